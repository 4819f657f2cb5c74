"""Every error this project raises on purpose, with the exit code it gives ``zm``.

    ZeroMismatchError                       70  our own fault, if it ever surfaces bare
    ├── UsageError (ValueError)              2  unusable arguments, files, schedules, recipes
    │   ├── CheckpointError                  2  missing, truncated or foreign checkpoint
    │   ├── NonFiniteError                   2  NaN or infinity where a number is needed
    │   ├── ScheduleError                    2  a schedule that no engine may run
    │   ├── RecipeError                      2  a recipe or plan that cannot be used here
    │   └── ContractError                    2  tensors outside what a kernel contract covers
    ├── MisalignedError (ValueError)         3  two runs that are not about the same thing
    ├── InconclusiveError (RuntimeError)     3  nothing was compared, or too little
    ├── CapabilityError (RuntimeError)       4  this machine or environment lacks something
    │   ├── UncoveredSiteError               4  an operator site without a contract
    │   ├── NotCertifiedError                4  no implementation proved a contract here
    │   └── DiskError (OSError)              4  no room, or no right to write
    └── BudgetError (TimeoutError)           5  time or budget spent

Each class also inherits the standard type it refines. Every message ends with the next step.
Exit code 1 is a verdict (divergent, gate failed), never an exception.
"""


class ZeroMismatchError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what ``zm`` returns."""

    exit_code = 70


class UsageError(ZeroMismatchError, ValueError):
    """Arguments, files, schedules or recipes that cannot be used as given."""

    exit_code = 2


class CheckpointError(UsageError):
    """A checkpoint that is missing, truncated or foreign."""


class NonFiniteError(UsageError):
    """NaN or infinity where a finite number is required; the message says where."""


class ScheduleError(UsageError):
    """A schedule with a gap, an overlap, a future position, or a hit off its granule."""


class RecipeError(UsageError):
    """A recipe or plan that is malformed or belongs to another model."""


class ContractError(UsageError):
    """Tensors (dtype, shape, device, layout) outside what a kernel contract covers."""


class MisalignedError(ZeroMismatchError, ValueError):
    """Two runs that differ in tokens or weights, so that comparing values means nothing."""

    exit_code = 3


class InconclusiveError(ZeroMismatchError, RuntimeError):
    """Nothing was compared, or too little to give a verdict."""

    exit_code = 3


class CapabilityError(ZeroMismatchError, RuntimeError):
    """This machine or environment lacks something that the request needs."""

    exit_code = 4


class UncoveredSiteError(CapabilityError):
    """An operator site that no contract covers; the message names it."""


class NotCertifiedError(CapabilityError):
    """No implementation of a contract could be proved on this machine."""


class DiskError(CapabilityError, OSError):
    """Not enough disk, or no right to write there."""


class BudgetError(ZeroMismatchError, TimeoutError):
    """Time or another budget ran out before there was an answer."""

    exit_code = 5
