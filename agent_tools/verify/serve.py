"""What a worker does once it is confined: load one candidate and run it on the parent's inputs.

It answers with raw tensors and with where they lie in memory; it compares and times nothing. Every
tensor it hands to the candidate lies between guards of a known pattern, and so does every result of
``torch.empty`` that the candidate asks for (not while it is being timed). Between calls the
allocator is filled with garbage.

Runs inside :mod:`.worker`; beside what loads any kernel file, the standard library, numpy and torch
only.
"""

import importlib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy
import torch
from torch import Tensor

from ...model_recipes.native import Native, functions_of
from .facade import entries_for

GUARD = 512  # bytes on each side; a multiple of every vector width
PATTERNS = {"nan": 0xFF, "other": 0x55}
_EMPTY, _EMPTY_LIKE = torch.empty, torch.empty_like
_FILLED = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``."""
    return getattr(torch, name)


def operators_of(wanted: dict[str, Any] | None) -> dict[str, ModuleType]:
    """The package's operators that a candidate of its own contract may use, before confinement."""
    if wanted is None:
        return {}
    from ...kernels import certify, dispatch
    from ...kernels.contract import get_contract

    found = {
        name: importlib.import_module(f"zeromismatch.kernels.{name}")
        for name in (*wanted["modules"], "linear.packs")
    }
    for contract, name in wanted["contracts"]:
        dispatch.adopt(contract, name)
        case = next(iter(certify.cases_of(get_contract(contract), quick=True, seed=0)))
        dispatch.choose(contract).run(*case.arguments)  # looks up what it needs of the core
    return found


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, row-major."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return flat.numpy().tobytes()


class Raised:
    """Holds whatever a candidate raises, and what can be said of it: ``with raised: ...``."""

    answer: dict[str, Any] | None = None

    def __enter__(self) -> "Raised":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:  # fmt: skip
        if error is None:
            return True
        entries = traceback.extract_tb(trace)
        lines = [entry.lineno for entry in entries if entry.filename == "candidate.py"]
        text = str(error)[:300]
        self.answer = {"error": type(error).__name__[:60], "text": text, "line": lines[-1:]}
        return True


class Memory:
    """Guarded blocks: those of the inputs, kept while sizes allow, and of ``torch.empty``."""

    def __init__(self, device: str, pattern: str) -> None:
        self.device, self.byte = device, PATTERNS[pattern]
        self.inputs: dict[int, Tensor] = {}
        self.given: dict[int, tuple[Tensor, int]] = {}

    def block(self, length: int) -> Tensor:
        """uint8 of ``length`` bytes between two guards, all of the pattern."""
        total = GUARD + -(-length // 64) * 64 + GUARD
        return _EMPTY(total, dtype=torch.uint8, device=self.device).fill_(self.byte)

    def guarded(self, size: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        """A tensor inside a new block that is remembered until :meth:`forget`."""
        count = 1
        for each in size:
            count *= each
        length = count * dtype.itemsize
        block = self.block(length)
        self.given[block.untyped_storage().data_ptr()] = (block, GUARD + length)
        return block[GUARD : GUARD + length].view(dtype).view(tuple(size))

    def place(self, index: int, spec: dict[str, Any], body: memoryview, *, off: bool) -> Tensor:
        """One input: in the block it had in the last call where the size allows, else a new one."""
        dtype, shape = dtype_of(spec["dtype"]), spec["shape"]
        start = GUARD + (dtype.itemsize if off else 0)
        block = self.inputs.get(index)
        if block is None or block.numel() != GUARD * 2 + -(-(len(body) + start - GUARD) // 64) * 64:
            block = self.inputs[index] = self.block(len(body) + start - GUARD)
        if block.is_cuda:
            block.fill_(self.byte)
            content = torch.frombuffer(bytearray(body), dtype=torch.uint8) if len(body) else None
            if content is not None:
                block[start : start + len(body)] = content.to(block.device)
        else:  # through numpy, so that no version counter tells of it
            array = block.numpy()
            array[:] = self.byte
            array[start : start + len(body)] = numpy.frombuffer(body, dtype=numpy.uint8)
        return block[start : start + len(body)].view(dtype).view(shape)

    def spoil(self, sizes: Sequence[int]) -> None:
        """Leave garbage in freed memory of these sizes."""
        for size in sizes:
            for _ in range(2):
                _EMPTY(size, dtype=torch.uint8, device=self.device).fill_(self.byte)

    def forget(self) -> None:
        """Before a call: nothing that was given out counts any more."""
        self.given.clear()

    def patch(self) -> None:
        """``torch.empty`` and its kin give guarded memory from now on."""
        for owner, name in _FILLED:
            setattr(owner, name, self._allocating(name))

    def _allocating(self, name: str) -> Callable[..., Tensor]:
        def allocate(*arguments: Any, **options: Any) -> Tensor:
            like = arguments[0] if name != "empty" else None
            sizes = arguments if like is None else arguments[1:]
            size: Any = like.shape if name == "empty_like" and like is not None else sizes
            if len(size) == 1 and not isinstance(size[0], int):
                size = size[0]
            dtype = options.get("dtype") or (like.dtype if like is not None else None)
            dtype = dtype or torch.get_default_dtype()
            device = options.get("device") or (like.device if like is not None else self.device)
            if name == "empty" and torch.device(device).type != torch.device(self.device).type:
                return _EMPTY(*arguments, **options)
            return self.guarded(list(size), dtype, device)

        return allocate


class Server:
    """One candidate and the parent's requests about it."""

    def __init__(
        self, device: str, pattern: str | None, operators: dict[str, ModuleType] | None = None
    ) -> None:
        self.device, self.operators = device, operators or {}
        self.memory = Memory(device, pattern or "nan")
        self.poisons = pattern is not None
        self.entries: dict[str, Callable[..., Any]] = {}
        self.pool: list[list[Any]] = []
        self.last: list[Any] = []
        self.marks: list[tuple[int, int]] = []
        self.counter = 0

    def load(self, head: dict[str, Any], watch: Callable[[], None]) -> dict[str, Any]:
        """Load the candidate; from now on ``torch.empty`` is guarded where the worker poisons.

        watch: called between the library, whose loading is an event, and the candidate's own text.
        """
        symbols = head.get("symbols", [])
        with Raised() as raised:
            native = Native(head["library"], symbols) if head.get("library") else None
            watch()
            source = Path(head["source"])
            names = head.get("names", [])
            given = {here: getattr(self.operators[at], name) for at, name, here in names}
            self.entries = functions_of(source.read_bytes(), source.name, native, given)
            if "trees" in head:
                self.entries |= entries_for(self.entries["forward"], head["trees"])
        if raised.answer is not None:
            return raised.answer
        if self.poisons:
            self.memory.patch()
        return {"ok": True, "entries": sorted(self.entries)}

    def arguments(self, head: dict[str, Any], body: bytearray) -> list[Any]:
        """The request's arguments, tensors in guarded memory."""
        view, at, arguments = memoryview(body), 0, []
        for index, spec in enumerate(head["args"]):
            if "shape" in spec:
                part = view[at : at + spec["bytes"]]
                at += spec["bytes"]
                arguments.append(self.memory.place(index, spec, part, off=head.get("off", False)))
            else:
                arguments.append(dtype_of(spec["name"]) if "name" in spec else spec["value"])
        return arguments

    def call(self, head: dict[str, Any], body: bytearray) -> tuple[dict[str, Any], list[bytes]]:
        """Run one entry once; outputs, and afterwards the inputs with their guards, as they are."""
        arguments = self.arguments(head, body)
        self.memory.spoil(head["sizes"])
        self.memory.forget()
        if self.operators:  # the bytes above were written behind torch's back
            self.operators["linear.packs"].forget_all()
        result: Any = None
        with Raised() as raised:
            result = self.entries[head["entry"]](*arguments)
        if raised.answer is not None:
            return raised.answer, []
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        described = [self.describe(each) for each in outputs]
        parts = [raw(each) for each in outputs if type(each) is Tensor]
        blocks = [self.memory.inputs[i] for i, s in enumerate(head["args"]) if "shape" in s]
        parts += [raw(block) for block in blocks]
        where = [[block.untyped_storage().data_ptr(), block.numel()] for block in blocks]
        guards = [  # from the tensor's last byte on: what rounds a block up is nobody's either
            bool((block[:GUARD] == self.memory.byte).all())
            and bool((block[end:] == self.memory.byte).all())
            for block, end in self.memory.given.values()
        ]
        lengths = [block.numel() for block in blocks]
        head = {"ok": True, "outputs": described, "inputs": where, "blocks": lengths}
        return {**head, "guards": all(guards)}, parts

    def describe(self, output: Any) -> dict[str, Any]:
        """Type, place and shape of one output."""
        if output is None:
            return {"none": True}
        if type(output) is not Tensor:
            return {"type": type(output).__name__}
        storage = output.untyped_storage()
        return {
            "dtype": str(output.dtype).removeprefix("torch."),
            "shape": list(output.shape),
            "bytes": output.numel() * output.element_size(),
            "grad": output.requires_grad,
            "at": output.data_ptr(),
            "storage": [storage.data_ptr(), storage.nbytes()],
        }

    def prepare(self, head: dict[str, Any], body: bytearray) -> dict[str, Any]:
        """Take several sets of arguments to be launched in turn."""
        at = 0
        self.pool, self.last, self.counter = [], [None] * len(head["sets"]), 0
        self.marks = [(spec["argument"], spec["element"]) for spec in head["marks"]]
        for specs in head["sets"]:
            length = sum(spec.get("bytes", 0) for spec in specs)
            self.memory.inputs = {}
            self.pool.append(self.arguments({"args": specs}, body[at : at + length]))
            at += length
        return {"ok": True}

    def launch(self, entry: str, count: int) -> dict[str, Any]:
        """Run ``count`` launches, each on content that was never seen before."""
        run, pool, last, marks = self.entries[entry], self.pool, self.last, self.marks
        arrays = [_bits(pool[s][a]) if a >= 0 else None for s, (a, _) in enumerate(marks)]
        with Raised() as raised:
            for index in range(count):
                number = self.counter + index
                s = number % len(pool)
                array = arrays[s]
                if array is not None:
                    array[marks[s][1]] = marked(number, array.itemsize)
                last[s] = run(*pool[s])
            if self.device != "cpu":
                torch.cuda.synchronize()
        self.counter += count
        return raised.answer or {"ok": True}

    def results(self) -> tuple[dict[str, Any], list[bytes]]:
        """Outputs of the last launch of each set."""
        sets = [list(each) if isinstance(each, tuple | list) else [each] for each in self.last]
        described = [[self.describe(each) for each in outputs] for outputs in sets]
        parts = [raw(each) for outputs in sets for each in outputs if type(each) is Tensor]
        return {"ok": True, "sets": described}, parts


def marked(number: int, itemsize: int) -> int:
    """Bits of a number between 1 and 2 that is another one for every launch."""
    return 0x3F800000 | number & 0x7FFFFF if itemsize == 4 else 0x3F80 | number & 0x7F


def _bits(tensor: Tensor) -> Any:
    kinds = {4: torch.int32, 2: torch.int16}
    flat = tensor.view(-1).view(kinds[tensor.element_size()])
    return flat.numpy() if flat.device.type == "cpu" else _OnDevice(flat)


class _OnDevice:
    """Writes single elements of a device tensor, as numpy does on the CPU."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.itemsize = flat, flat.element_size()

    def __setitem__(self, index: int, value: int) -> None:
        self.flat[index].fill_(value)

