"""What explain returns: the tables of paths for a call, and what they were asked for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """The facts about a device that a choice depends on."""

    capability: int  # 90 for 9.0
    multiprocessors: int
    shared_bytes: int

    def __str__(self):
        shared = f"{self.shared_bytes / 1024:.0f} KB of shared memory a block"
        return f"capability {self.capability // 10}.{self.capability % 10}, {self.multiprocessors} SMs, {shared}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's instances in the library, as they came out for this GPU: least and most."""

    name: str
    registers: tuple[int, int]
    static_shared_bytes: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Path:
    """A row of the table. `reason` says why it does not take the call, and is empty for the one that does and for those
    after it that could."""

    name: str
    file: str
    kernels: tuple[str, ...]
    supports: bool
    is_fast: bool
    chosen: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Product:
    """Forward or a gradient: its table for the call."""

    name: str
    paths: tuple[Path, ...]
    note: str = ""

    @property
    def chosen(self) -> Path | None:
        return next((path for path in self.paths if path.chosen), None)


@dataclasses.dataclass(frozen=True)
class Explanation:
    op: str
    device: Device
    products: tuple[Product, ...]
    kernels: dict[str, Kernel]  # by name, of the paths that run; empty without a GPU

    def __getitem__(self, name: str) -> Product:
        return next(product for product in self.products if product.name == name)
