"""What `convert` did, and what it did not and why."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layer:
    """One module of the model that has no submodules, or that convert could have taken."""

    name: str
    """The first of its names in the model; "" for the model itself."""
    kind: str
    """Its class."""
    reason: str | None = None
    """Why it was left; None if it is ours now."""


@dataclass(frozen=True)
class Fusion:
    """Calls in one module's forward that were fused or, where it is a function alone, replaced."""

    module: str
    """The module whose forward it is."""
    op: str
    """A function of cuda_ops.functional."""
    parts: tuple[str, ...]
    """Submodules by their names in `module`, and functions as `relu()`."""


@dataclass
class Report:
    """What :func:`cuda_ops.convert` did with a model. `print(report)` shows a line for each class of layers;
    `report.names()` one for each layer."""

    model: str
    layers: list[Layer] = field(default_factory=list)
    fusions: list[Fusion] = field(default_factory=list)
    untraced: dict[str, str] = field(default_factory=dict)
    """{module with a forward of its own: why torch.fx was not let in}"""

    @property
    def swapped(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.reason is None]

    @property
    def left(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.reason is not None]

    def as_dict(self) -> dict:
        """Everything, of strings, numbers, lists and dicts."""
        return {
            "model": self.model,
            "swapped": {layer.name: layer.kind for layer in self.swapped},
            "left": {layer.name: {"class": layer.kind, "reason": layer.reason} for layer in self.left},
            "fusions": [{"module": f.module, "op": f.op, "parts": list(f.parts)} for f in self.fusions],
            "untraced": dict(self.untraced),
        }

    def rows(self) -> list[tuple[str, int, int, str]]:
        """(class, swapped, left, why), the most frequent class first."""
        swapped = Counter(layer.kind for layer in self.swapped)
        left = Counter(layer.kind for layer in self.left)
        rows = []
        for kind, _ in (swapped + left).most_common():
            reasons = Counter(layer.reason for layer in self.left if layer.kind == kind)
            why = "; ".join(r if len(reasons) == 1 else f"{r} ({n})" for r, n in reasons.most_common())
            rows.append((kind, swapped[kind], left[kind], why))
        return rows

    def names(self) -> str:
        """A line for each layer, fusion and module that was not traced."""
        lines = [f"{layer.name or '(the model)'}: {layer.kind}, {layer.reason or 'ours'}" for layer in self.layers]
        lines += [f"{f.module or '(the model)'}: {f.op} of {', '.join(f.parts)}" for f in self.fusions]
        lines += [f"{name or '(the model)'}: not traced: {reason}" for name, reason in self.untraced.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = [("class", "ours", "left", "why"), *((kind, str(a), str(b), why) for kind, a, b, why in self.rows())]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{self.model}: {len(self.swapped)} of {len(self.layers)} layers are ours"]
        for kind, ours, left, why in rows:
            lines.append(f"  {kind:<{widths[0]}}  {ours:>{widths[1]}}  {left:>{widths[2]}}  {why}".rstrip())
        for (op, size), count in Counter((f.op, len(f.parts)) for f in self.fusions).most_common():
            lines.append(f"  {op}: {count} × {f'{size} calls in one' if size > 1 else 'in place of a function'}")
        return "\n".join(lines)
