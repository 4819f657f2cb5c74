"""Which functions a candidate defines for a contract, and what each is compared with.

    entries = entries_of(get_contract("rmsnorm.lanes16.float32.cpu.v1"))
    entries["backward"].contract.id         # "rmsnorm_grad.lanes16.float32.cpu.v1"

``forward`` takes the arguments of the contract's reference, in its order; each backward those of
its gradient contract's reference. Operators without a gradient of their own (sampling; the rotary
table; rotary, whose gradient is the forward with the sine's sign turned) have ``forward`` alone.
"""

import inspect
from dataclasses import dataclass

from . import certify
from .contract import Contract, contracts, get_contract
from .dispatch import reference
from .errors import UsageError

GRADIENTS: dict[str, dict[str, str]] = {
    "linear": {
        "backward_input": "linear_grad_input",
        "backward_weight": "linear_grad_weight",
        "backward_bias": "linear_grad_bias",
    },
    **{
        op: {
            "backward_input": "linear_grad_input",
            "backward_weight": "linear_grad_weight",
            "backward_bias": "linear_grad_bias",
        }
        for op in ("lm_head", "router")
    },
    **{
        op: {"backward": f"{op}_grad"}
        for op in (
            "activation", "activation_gelu", "attention", "combine", "convolution", "decay",
            "discretised", "embedding", "gated", "gated_gelu", "gated_rmsnorm", "grouped_linear",
            "l2norm", "logprob", "recurrence", "relu_squared", "rmsnorm", "rmsnorm_wide",
            "sigmoid", "sigmoid_mul", "skip", "softcap", "time_step", "topk_weights",
        )
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One function of a candidate. ``contract``: whose reference defines its bits."""

    name: str
    contract: Contract
    parameters: int


def contract_for(contract_id: str) -> tuple[Contract, bool]:
    """The contract, and whether it is new: an id nobody registered, for an operator that exists.

    A new id ``<op>.<order>.<dtype>.<device>.v<n>`` borrows formula and tolerance from a registered
    contract of its operator, dtype and device; its bits have no reference yet.
    """
    certify.load_operators()
    known = {entry.id: entry for entry in contracts()}
    if contract_id in known:
        contract = known[contract_id]
        if any(contract.op in pair.values() for pair in GRADIENTS.values()):
            raise UsageError(
                f"{contract_id} is a gradient; verify the file against its forward contract, "
                "which asks for the backward as well"
            )
        return contract, False
    parts = contract_id.split(".")
    model = next(
        (
            entry
            for entry in known.values()
            if len(parts) >= 5
            and (entry.op, entry.dtype, entry.device) == (parts[0], *parts[-3:-1])
        ),
        None,
    )
    if model is None or not parts[-1].removeprefix("v").isdigit():
        raise UsageError(
            f"no contract {contract_id!r}; `zm kernels list` shows the registered ones, and a new "
            "one is named <op>.<order>.<dtype>.<device>.v<n> after a registered operator"
        )
    return model, True


def entries_of(contract: Contract) -> dict[str, Entry]:
    """The functions wanted of a candidate for ``contract``, by name."""
    wanted = {"forward": contract}
    for name, op in GRADIENTS.get(contract.op, {}).items():
        found = list(contracts(op=op, dtype=contract.dtype, device=contract.device))
        if found:
            wanted[name] = get_contract(found[-1].id)
    return {
        name: Entry(name=name, contract=each, parameters=_count(each))
        for name, each in wanted.items()
    }


def _count(contract: Contract) -> int:
    parameters = inspect.signature(reference(contract.id).run).parameters.values()
    return sum(each.kind is not each.KEYWORD_ONLY for each in parameters)
