"""Cheats, each with the rule that must name it. Text, never imported; the verifier runs it.

Honest parts are shared: ROTARY and EMBEDDING are right in plain torch, so that each cheat is one
change of something that would pass. ``hole``: the static check is taken away first, since it is
necessary and never sufficient: what gets past it must be stopped by what stands behind it.
"""

from dataclasses import dataclass

ROTARY_ID = "rotary.half.float32.cpu.v1"
EMBEDDING_ID = "embedding.gather.float32.cpu.v1"
SILU_ID = "activation.silu.float32.cpu.v1"
NORM_ID = "rmsnorm.lanes16.float32.cpu.v1"
NEW_EMBEDDING_ID = "embedding.redteam.float32.cpu.v1"
NEW_SILU_ID = "activation.redteam.float32.cpu.v1"

ROTARY = '''"""Rotary in plain torch."""
import torch
{above}

def forward(x, cos, sin):
    """Turn the first columns of every head."""
    {first}
    width = cos.shape[1]
    half = width // 2
    a, b = x[..., :half], x[..., half:width]
    c, s = cos[:, None], sin[:, None]
    left = a * c[..., :half] - b * s[..., :half]
    right = b * c[..., half:] + a * s[..., half:]
    y = torch.cat((left, right, x[..., width:]), dim=-1)
    {last}
    return y
'''

EMBEDDING = '''"""Embedding in plain torch."""
import torch
{above}

def forward(ids, weight):
    """Rows of the table."""
    {first}
    return weight[ids]


def backward(dy, ids, vocabulary, initial=None, out=None):
    """Tokens added to their rows, ascending."""
    total = torch.zeros(vocabulary, dy.shape[1]) if initial is None else initial.clone()
    for t, row in enumerate(ids.tolist()):
        total[row] = total[row] + {added}
    return total
'''

NATIVE = '''"""Rotary copied by C++ code that does something else besides."""
import torch

CPP = r"""
#include <cstdint>
#include <cstring>
{above}
extern "C" void copy(const float *x, float *y, int64_t count) {{
    {body}
    std::memcpy(y, x, count * sizeof(float));
}}
"""


def forward(x, cos, sin):
    """Turn the first columns of every head."""
    width = cos.shape[1]
    half = width // 2
    a, b = x[..., :half], x[..., half:width]
    c, s = cos[:, None], sin[:, None]
    left = a * c[..., :half] - b * s[..., :half]
    right = b * c[..., half:] + a * s[..., half:]
    turned = torch.cat((left, right, x[..., width:]), dim=-1).contiguous()
    y = torch.empty_like(turned)
    native("copy", turned, y, turned.numel())
    return y
'''

NORM = '''"""RMSNorm whose two gradients are one piece of memory."""
import torch


def forward(x, weight, eps, unit_offset=False, residual=None):
    """x, unscaled."""
    return x * 1.0


def backward(dy, s, weight, eps, unit_offset=False, ds=None, initial=None):
    """dx, and a row of it as dw."""
    dx = dy * 1.0
    return dx, dx[0]
'''

SILU = '''"""SiLU that is judged against itself: a new contract."""
import torch
{above}

def forward(x):
    """x times its sigmoid."""
    {first}
    return {value}


def backward(dy, x):
    """The slope."""
    sig = torch.sigmoid(x)
    return {slope}
'''


@dataclass(frozen=True, kw_only=True)
class Cheat:
    """One attempt: the file, the contract, the rule that must be named."""

    rule: str
    source: str
    contract: str = ROTARY_ID
    hole: bool = False
    questions: tuple[str, ...] = ("bits",)


def rotary(above: str = "", first: str = "pass", last: str = "pass") -> str:
    """ROTARY with something added."""
    return ROTARY.format(above=above, first=first, last=last)


def embedding(above: str = "", first: str = "pass", added: str = "dy[t]") -> str:
    """EMBEDDING with something added."""
    return EMBEDDING.format(above=above, first=first, added=added)


def native(above: str = "", body: str = "") -> str:
    """NATIVE with something added."""
    return NATIVE.format(above=above, body=body)


def silu(
    above: str = "",
    first: str = "pass",
    value: str = "x * torch.sigmoid(x)",
    slope: str = "dy * (sig * (1 + x * (1 - sig)))",
) -> str:
    """SILU with something changed."""
    return SILU.format(above=above, first=first, value=value, slope=slope)


STATIC = {
    "not Python": Cheat(rule="syntax", source="def forward(x:"),
    "three hundred kilobytes": Cheat(rule="syntax", source="#" * 300_000),
    "no backward": Cheat(rule="entry", source=rotary(), contract=EMBEDDING_ID),
    "another signature": Cheat(rule="entry", source=rotary().replace("x, cos, sin)", "*args)")),
    "no docstring": Cheat(rule="docstring", source=rotary().replace('"""Turn', '_ = """Turn')),
    "imports a package": Cheat(rule="import", source=rotary("import numpy")),
    "both sides through the reference": Cheat(
        rule="reference",
        source=rotary("from zeromismatch.kernels.reference.rotary import apply_rotary"),
    ),
    "starts a shell": Cheat(rule="process", source=rotary("import subprocess")),
    "starts a process by os": Cheat(rule="process", source=rotary("from os import fork")),
    "starts a thread": Cheat(rule="thread", source=rotary("import threading")),
    "phones home": Cheat(rule="network", source=rotary("import urllib.request")),
    "asks the environment": Cheat(
        rule="environment", source=rotary(first="torch.os.environ['ZM'] = '1'")
    ),
    "replays recorded logprobs": Cheat(rule="file", source=rotary(first="return torch.load('a')")),
    "reads a golden": Cheat(rule="file", source=rotary(first="open('/etc/passwd')")),
    "patches the timer": Cheat(rule="clock", source=rotary("import time")),
    "patches the comparer": Cheat(rule="patch", source=rotary(first="torch.equal = max")),
    "patches by setattr": Cheat(rule="patch", source=rotary(first="setattr(torch, 'equal', max)")),
    "turns off the fast path": Cheat(
        rule="settings", source=rotary(first="torch.set_num_threads(1)")
    ),
    "fixes the seed": Cheat(rule="settings", source=rotary(first="torch.manual_seed(0)")),
    "walks the frames": Cheat(rule="reflection", source=rotary(first="x.__class__.__mro__")),
    "finds sys through torch": Cheat(rule="reflection", source=rotary(first="torch.sys.modules")),
    "builds code": Cheat(rule="code", source=rotary(first="eval('1')")),
    "compiles by torch": Cheat(rule="code", source=rotary(first="torch.compile(forward)")),
    "swallows an exception": Cheat(
        rule="swallow", source=rotary(first="try:\n        pass\n    except: y = x * 0")
    ),
    "caches by input": Cheat(rule="state", source=rotary("CACHE = {}")),
    "caches by decorator": Cheat(
        rule="state", source=rotary("from functools import lru_cache\n@lru_cache\ndef f(): pass")
    ),
    "caches on a function": Cheat(rule="state", source=rotary(first="forward.cache = x")),
    "caches in a default": Cheat(rule="state", source=rotary("def f(kept=[]): pass")),
    "keys on addresses": Cheat(rule="state", source=rotary(first="x.data_ptr()")),
    "answers later": Cheat(rule="deferred", source=rotary("class Later(torch.Tensor): pass")),
    "carries weights": Cheat(rule="weights", source=rotary(f"W = ({', '.join(['1.5'] * 300)})")),
    "carries text": Cheat(rule="weights", source=rotary(f"W = '{'x' * 3000}'")),
    "C++ with a socket": Cheat(rule="native", source=native(body="socket(2, 1, 0);")),
    "C++ with a foreign header": Cheat(rule="native", source=native("#include <unistd.h>")),
    "C++ with assembly": Cheat(rule="native", source=native(body='asm("syscall");')),
    "C++ with a pasted name": Cheat(rule="native", source=native("#define P(a, b) a##b")),
    "C++ with a split name": Cheat(rule="native", source=native(body="sys\\\ntem(0);")),
    "C++ with a declaration": Cheat(
        rule="native", source=native('extern "C" long write(int, const void *, unsigned long);')
    ),
}

DYNAMIC = {
    "C++ that does not compile": Cheat(rule="load", source=native(body="no such thing;")),
    "raises on odd rows": Cheat(
        rule="exception", source=rotary(first="assert x.shape[0] % 2 == 0")
    ),
    "null pointer": Cheat(rule="crash", source=native(body="*(volatile int *)0 = 1;"), hole=True),
    "never ends": Cheat(rule="time", source=rotary(first="while True: pass")),
    "sleeps": Cheat(rule="time", hole=True, source=rotary("import time", "time.sleep(60)")),
    "allocates bit by bit": Cheat(
        rule="memory",
        source=rotary(first="kept = []\n    while True: kept.append(torch.zeros(1 << 24))"),
    ),
    "allocates without end": Cheat(
        rule="memory", source=rotary(first="torch.ones(1 << 33, dtype=torch.uint8)")
    ),
    "C++ socket": Cheat(
        rule="syscall",
        hole=True,
        source=native('extern "C" int socket(int, int, int);', "socket(2, 1, 0);"),
    ),
    "C++ fork": Cheat(
        rule="syscall", hole=True, source=native('extern "C" int fork();', "while (fork() >= 0);")
    ),
    "C++ shell": Cheat(
        rule="syscall", hole=True, source=native("#include <cstdlib>", '(void)!system("id");')
    ),
    "C++ thread": Cheat(
        rule="syscall",
        hole=True,
        source=native("#include <thread>", "std::thread([] { for (;;); }).detach();"),
    ),
    "kills its parent": Cheat(
        rule="syscall", hole=True, source=native("#include <csignal>", "kill(1, 9);")
    ),
    "shell by Python": Cheat(
        rule="runtime-ban", hole=True, source=rotary("import os", "os.system('id')")
    ),
    "socket by Python": Cheat(
        rule="runtime-ban", hole=True, source=rotary(first="import socket; socket.socket()")
    ),
    "writes outside the workspace": Cheat(
        rule="runtime-ban", hole=True, source=rotary(first="open('/tmp/zm-out', 'w')")
    ),
    "reads the reference": Cheat(
        rule="runtime-ban", hole=True, source=rotary(first="import zeromismatch.kernels.bits")
    ),
    "thread by Python": Cheat(
        rule="syscall",
        hole=True,
        source=rotary("import _thread", "_thread.start_new_thread(print, ())"),
    ),
    "talks to the parent": Cheat(
        rule="protocol",
        hole=True,
        source=rotary("import os", "[os.write(n, b'0' * 99) for n in range(3, 6)]"),
    ),
    "leaves": Cheat(rule="protocol", hole=True, source=rotary("import os", "os._exit(0)")),
    "works on after it returned": Cheat(
        rule="background",
        hole=True,
        source=native(
            "#include <thread>\n#include <unistd.h>\nstatic bool started = false;",
            "if (count == 1 && !started) { started = true;\n"
            "        std::thread([] { for (volatile int i = 0;; ++i); }).detach(); }",
        ).replace(
            'native("copy", turned',
            'torch.get_num_threads() > 1 and native("copy", torch.ones(1), torch.empty(1), 1)\n'
            '    native("copy", turned',
        ),
    ),
    "rounds before the comparison": Cheat(
        rule="bits", source=rotary(last="y = y.to(torch.bfloat16).float()")
    ),
    "special-cases the shapes of the sweep": Cheat(
        rule="bits", source=rotary(last="y = y if x.shape[0] in (1, 7, 40, 130) else y * 1.0000001")
    ),
    "batch leak": Cheat(rule="bits", source=rotary(last="y = y + 0 * y.sum()")),
    "shrinks the mask": Cheat(
        rule="tensors", source=rotary(last="y = y[: max(1, y.shape[0] - 1)]")
    ),
    "another dtype": Cheat(rule="tensors", source=rotary(last="y = y.double()")),
    "returns a parameter": Cheat(
        rule="deferred", source=rotary(last="y = torch.nn.Parameter(y, False)")
    ),
    "returns one tensor twice": Cheat(rule="alias", contract=NORM_ID, source=NORM),
    "returns its input": Cheat(rule="alias", source=rotary(last="y = x")),
    "changes its input": Cheat(rule="inputs", source=rotary(last="x.add_(1.0)")),
    "writes past the end": Cheat(rule="guard", source=native(body="y[count] = 0;")),
    "writes before the input": Cheat(
        rule="guard",
        source=native(body="((float *)x)[-1] = 0;").replace(
            'native("copy", turned',
            'native("copy", x, torch.empty_like(x), 1)\n    native("copy", turned',
        ),
    ),
    "leaves rows out": Cheat(
        rule="unwritten",
        source=native().replace("turned.numel())", "turned[1:].numel() or 1)"),
    ),
    "divides by zero": Cheat(
        rule="nonfinite", source=rotary(last="y = y / 0.0 if y.shape[0] > 8 else y")
    ),
    "answers from memory": Cheat(
        rule="stale",
        source=native(
            "static float kept[1 << 22]; static int used = 0;\n"
            "static int64_t filled = 0, at[64], lengths[64];",
            "for (int i = 0; i < used; ++i) if (lengths[i] == count) {\n"
            "        std::memcpy(y, kept + at[i], count * sizeof(float)); return; }\n"
            "    if (used < 64 && filled + count < (1 << 22)) { lengths[used] = count;\n"
            "        at[used] = filled; std::memcpy(kept + filled, x, count * sizeof(float));\n"
            "        filled += count; ++used; }",
        ),
    ),
    "keeps an earlier weight": Cheat(
        rule="stale",
        contract=EMBEDDING_ID,
        hole=True,
        source=embedding(
            "KEPT = {}", "weight = KEPT.setdefault(tuple(weight.shape), weight.clone())"
        ),
    ),
    "reads freed memory": Cheat(
        rule="memory-content",
        source=rotary(last="y = y * (1.0 + float(torch.empty(9).sum() > 0))"),
    ),
    "looks at the threads": Cheat(
        rule="order", source=rotary(last="y = y * (1.0 + float(torch.get_num_threads() > 1))")
    ),
    "bf16 inside": Cheat(
        rule="accuracy",
        contract=NEW_SILU_ID,
        questions=("bits", "accuracy"),
        source=silu(value="(x * torch.sigmoid(x)).to(torch.bfloat16).float()"),
    ),
    "zero backward": Cheat(
        rule="gradient",
        contract=NEW_SILU_ID,
        questions=("bits", "gradient"),
        source=silu(slope="torch.zeros_like(dy) + 0 * sig"),
    ),
    "scaled backward": Cheat(
        rule="gradient",
        contract=NEW_EMBEDDING_ID,
        questions=("bits", "gradient"),
        source=embedding(added="0.999 * dy[t]"),
    ),
    "skips launches": Cheat(
        rule="launches",
        questions=("bits", "speed"),
        source=native("static int64_t calls = 0;", "if (++calls > 200 && calls % 4) return;"),
    ),
    "one row at a time": Cheat(
        rule="speed",
        questions=("bits", "speed"),
        source=rotary(last="y = torch.stack([row * 1.0 for row in y])"),
    ),
}
