"""The table of ``gpu.md`` from the numbers of one run, each row beside its goal."""

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
COPY = "copy bandwidth"

Line = tuple[str, str, str, str, bool | None]


def refresh(path: Path, results: dict[str, Any]) -> None:
    """Put the run's table between the marks of a Markdown file."""
    text = path.read_text()
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{table(results)}{END}{after}")


def table(results: dict[str, Any]) -> str:
    """The whole block: card and versions, then a row per claim."""
    card = (
        f"{results['card']}, torch {results['torch']}, Triton {results['triton']}, CUDA "
        f"{results['cuda']}, cuDNN {results['cudnn']}. Copy bandwidth measured in the run: "
        f"{results['copy_gbps']:.0f} GB/s.{_later(results)}\n\n"
    )
    head = "| work | against | goal | measured | met |\n| --- | --- | --- | --- | --- |\n"
    rows = [*_gemm(results), *_attention(results), *_rows(results), *_head(results)]
    failed = [
        f"{key} did not finish: {value}\n" for key, value in results.items() if "_failed" in key
    ]
    return card + head + "".join(map(_line, rows)) + "".join(failed)


def _later(results: dict[str, Any]) -> str:
    return "".join(
        f" From a later run ({run['copy_gbps']:.0f} GB/s): {', '.join(run['sections'])}."
        for run in results.get("later_runs", ())
    )


def _line(line: Line) -> str:
    work, against, goal, measured, met = line
    verdict = "" if met is None else "yes" if met else "no"
    return f"| {work} | {against} | {goal} | {measured} | {verdict} |\n"


def _gemm(results: dict[str, Any]) -> list[Line]:
    goals = {"M >= 512": (0.98, 0.93), "64 <= M < 512": (0.90, 0.70), "M < 64": (0.95, 0.80)}
    lines: list[Line] = []
    for row in results.get("gemm_summary", ()):
        mean, worst = goals[row["work"].removeprefix("GEMM, ")]
        got = row["ours"]
        lines.append(
            (
                row["work"],
                "torch default",
                f"geomean {mean}, worst {worst}",
                f"geomean {got['geomean']:.3f}, worst {got['worst']:.3f}",
                got["geomean"] >= mean and got["worst"] >= worst,
            )
        )
    return lines


def _ratios(rows: list[dict[str, Any]], name: str) -> tuple[str, float]:
    found = {row["length"]: row[name] / row["ours_ms"] for row in rows}
    return ", ".join(f"{n // 1024}k {r:.2f}" for n, r in found.items()), min(found.values())


def _attention(results: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    if prefill := results.get("prefill"):
        for name, label, goal in (
            ("flash3_ms", "FlashAttention 3 as in vLLM", 0.75),
            ("cudnn_ms", "cuDNN", None),
            ("flash2_ms", "torch's flash backend (FA2)", None),
        ):
            if name not in prefill[0]:
                continue
            shown, worst = _ratios(prefill, name)
            wanted = "floor 0.75, goal 0.85" if goal else ""
            met = None if goal is None else worst >= goal
            lines.append(("prefill attention, head 128", label, wanted, shown, met))
        if "adopted_ms" in prefill[0]:
            adopted = [{**row, "ours_ms": row["adopted_ms"]} for row in prefill]
            shown, worst = _ratios(adopted, "flash3_ms")
            work = "prefill attention, head 128, adopted contract"
            lines.append((work, "FlashAttention 3 as in vLLM", "1.0", shown, worst >= 0.98))
    for row in results.get("decode", ()):
        goal = 0.85 if row["batch"] >= 16 and not row["skewed"] else 0.7
        kind = ", skewed" if row["skewed"] else ""
        share = row["share_of_copy"]
        lines.append(
            (
                f"decode, {row['batch']} x {row['length'] // 1024}k{kind}",
                COPY,
                str(goal),
                f"{share:.2f} ({row['ours_us']:.0f} us)",
                share >= goal,
            )
        )
    if backward := results.get("attention_backward"):
        for name, label, goal in (
            ("flash2_ms", "torch SDPA's flash backward", 0.6),
            ("cudnn_ms", "torch SDPA's cuDNN backward (not bit-stable by contract)", None),
        ):
            shown, worst = _ratios(backward, name)
            met = None if goal is None else worst >= goal
            lines.append(("attention backward", label, str(goal or ""), shown, met))
    return lines


def _rows(results: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    for row in results.get("row_operators", ()):
        share = row["share_of_copy"]
        stock = f"; torch {row['torch_us'] / row['ours_us']:.2f}x" if row["torch_us"] else ""
        measured = f"{share:.2f} ({row['ours_us']:.0f} us{stock})"
        lines.append((row["work"], COPY, "0.85", measured, share >= 0.85))
    if embedding := results.get("embedding_backward"):
        found = [row["torch_ms"] / row["ours_ms"] for row in embedding]
        shown = ", ".join(
            f"{row['tokens'] // 1024}k {row['ids']} {ratio:.1f}x"
            for row, ratio in zip(embedding, found, strict=True)
        )
        lines.append(
            ("embedding backward", "torch's, deterministic mode", "faster", shown, min(found) > 1)
        )
    return lines


def _head(results: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    for row in results.get("head", ()):
        speed, memory = row["torch_ms"] / row["ours_ms"], row["torch_peak_gb"] / row["ours_peak_gb"]
        lines.append(
            (
                f"LM head + logprob, 8k tokens, H = {row['hidden']}, forward + backward",
                "unfused torch",
                "0.90, 1/8 of its memory",
                f"{speed:.2f}; 1/{memory:.1f}",
                speed >= 0.9 and memory >= 8,
            )
        )
    return lines
