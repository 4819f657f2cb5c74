"""Triton candidates: on a GPU where there is one, else what can be told of them without.

That is the static rules on Triton's own ways out, the refusal without a GPU, and the parts of a GPU
worker that need none.
"""

import struct
from pathlib import Path

import pytest
import torch

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.verify import confine, watch
from zeromismatch.agent_tools.verify.serve import _OnDevice, marked
from zeromismatch.agent_tools.verify.subject import registered
from zeromismatch.agent_tools.verify.verify import verify_kernel
from zeromismatch.kernels import certify
from zeromismatch.kernels.contract import contracts
from zeromismatch.model_recipes.candidate import check, parse_candidate

certify.load_operators()
SILU = next(each.id for each in contracts(op="activation", dtype="float32") if each.device != "cpu")
HONEST = '''"""SiLU in Triton."""
import torch
import triton
import triton.language as tl


@triton.jit
def silu_fwd_kernel(x, y, count, BLOCK: tl.constexpr):
    """One block of elements."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0)
    tl.store(y + at, value / (1.0 + tl.exp(-value)), mask=at < count)


def forward(x):
    """x times its sigmoid."""
    y = torch.empty_like(x)
    silu_fwd_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def backward(dy, gate, up=None):
    """The slope."""
    sig = torch.sigmoid(gate)
    return dy * sig * (1.0 + gate * (1.0 - sig))
'''
STORE = "    tl.store(y + at, value / (1.0 + tl.exp(-value)), mask=at < count)\n"
CHEATS = {
    "chooses by time": ("@triton.jit\n", "@triton.autotune(configs=[], key=[])\n@triton.jit\n",
                        "state"),
    "adds in any order": (STORE, "    tl.atomic_add(y + at, value, mask=at < count)\n", "order"),
    "brings machine code": (STORE, STORE + "    tl.inline_asm_elementwise('', '', [], 1)\n",
                            "code"),
    "reads the clock": (STORE, STORE + "    tl.extra.cuda.globaltimer()\n", "clock"),
    "works on a stream of its own": ("    y = torch", "    torch.cuda.Stream()\n    y = torch",
                                     "deferred"),
    "keeps a graph": ("    y = torch", "    torch.cuda.CUDAGraph()\n    y = torch", "deferred"),
    "keeps compiled work": ("def forward", "SEEN = []\n\n\ndef forward", "state"),
    "calls torch tl": ("import triton.language as tl", "import torch as tl", "patch"),
    "makes tl another thing": ("    y = torch", "    tl = torch\n    y = torch", "patch"),
    "turns TF32 on": ("    y = torch", "    torch.backends.x = True\n    y = torch", "settings"),
}  # fmt: skip


def faults(text: str) -> set[str]:
    subject = registered(SILU)
    wanted = {name: entry.parameters for name, entry in subject.entries.items()}
    return {each.rule for each in check(parse_candidate(Path("silu.py"), text.encode()), wanted)}


def test_an_honest_triton_file_breaks_no_static_rule():
    assert faults(HONEST) == set()


@pytest.mark.parametrize("name", CHEATS)
def test_a_triton_cheat_is_seen_in_the_file(name: str, tmp_path: Path):
    old, new, rule = CHEATS[name]
    text = HONEST.replace(old, new, 1)
    assert text != HONEST
    assert rule in faults(text)
    file = tmp_path / "silu.py"
    file.write_text(text)
    assert run(["verify", str(file), "--contract", SILU, "--json"]) == 1


def test_without_a_gpu_it_is_refused_and_never_called_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    file = tmp_path / "silu.py"
    file.write_text(HONEST)
    assert run(["verify", str(file), "--contract", SILU]) == 4
    assert "there is no GPU here" in capsys.readouterr().err


def test_every_gpu_contract_has_a_subject_with_a_formula_or_a_reason():
    for each in contracts():
        if each.device == "cpu" or each.op.endswith("_grad") or "_grad_" in each.op:
            continue
        subject = registered(each.id)
        assert subject.device == "cuda"
        assert subject.formula is not None or subject.why_no_formula, each.id


def test_single_elements_are_marked_through_the_device_tensor():
    flat = torch.zeros(5, dtype=torch.int32)
    _OnDevice(flat)[3] = marked(7, 4)
    assert flat.tolist() == [0, 0, 0, 0x3F800007, 0]


def test_a_gpu_worker_reads_the_drivers_files_and_never_this_package():
    held = watch.readable(gpu=True)
    assert {"/usr", "/dev"} <= set(held)
    assert not any("zeromismatch" in path for path in held)
    assert set(watch.readable(gpu=False)) < set(held)


def test_a_worker_that_fails_by_itself_says_why(tmp_path: Path):
    with watch.Nursery() as nursery:
        worker = nursery.start(tmp_path, trusted=True)
        with pytest.raises(watch.StoppedError, match="the worker failed: KeyError: 'nobody'"):
            worker.ask({"do": "trust", "contract": SILU, "implementation": "nobody"}, seconds=60.0)


def test_the_filter_of_a_gpu_worker_lets_the_driver_listen_on_a_local_socket_only():
    _, calls = confine._CALLS["x86_64"]
    assert _refused(calls, "listen", exec_=False)
    assert not _refused(calls, "listen", exec_=True)
    assert _refused(calls, "ptrace", exec_=True)


def _refused(calls: dict[str, int], name: str, *, exec_: bool) -> bool:
    code = confine.program(1, calls, threads=True, exec_=exec_)
    steps = [struct.unpack("=HBBI", code[at : at + 8]) for at in range(0, len(code), 8)]
    return any(value == calls[name] and code == 0x15 for code, _, _, value in steps)


GATED = "gated.exp2.bfloat16.sm90.v1"
WRONG = {
    "rounds the product alone": (
        "tl.math.exp2(-x * 1.4426950408889634)).to(y.dtype.element_ty)",
        "tl.math.exp2(-x * 1.4426950408889634))",
        "bits",
    ),
    "gives no gradient": (
        "(d * s).to(du.dtype.element_ty)", "(d * s * 0.0).to(du.dtype.element_ty)", "gradient"
    ),
    "returns its input": ("    return y\n", "    return gate\n", "alias"),
}  # fmt: skip


@pytest.mark.gpu
def test_an_honest_triton_kernel_is_green_on_a_gpu():
    file = Path(__file__).parent / "candidates" / "silu_mul_gpu.py"
    report = verify_kernel(file, GATED, quick=True)
    assert report.status == "pass", report.reason
    assert report.bits.elements
    assert not report.bits.differing
    assert all(control.red for control in report.controls)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_triton_kernel_is_named_on_a_gpu(name: str, tmp_path: Path):
    old, new, rule = WRONG[name]
    text = (Path(__file__).parent / "candidates" / "silu_mul_gpu.py").read_text()
    assert old in text
    file = tmp_path / "silu_mul.py"
    file.write_text(text.replace(old, new, 1))
    report = verify_kernel(file, GATED, quick=True)
    assert report.status == "fail"
    assert rule in {each.rule for each in report.violations}
