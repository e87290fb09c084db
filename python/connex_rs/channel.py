"""Step channels: arrays in, arrays out, in order, with flow control and a clear end.

`Engine.channel` gives a `Sender`, `Engine.accept_channel` a `Receiver`:

    channel = engine.channel(peer_url, "activations")          ch = engine.accept_channel("activations")
    channel.send([hidden, positions], corr=1)                  for step in ch:
    channel.close()                                                hidden, positions = step

The arrays of a received `Step` are views into the slot that it came in, without a copy. The slot is free for the sender
again when the step is released: by `step.release()`, at the end of `with step:`, or when neither the step nor a view of it is
referred to any more. Whoever calls `release` must be done with the views: the sender writes to their memory again.

A channel that fails raises ConnectionError with `untaken`, the correlation numbers of the steps that were not released. A
peer that has come back opens a fresh one.
"""

from __future__ import annotations

import ctypes
import importlib
from types import TracebackType
from typing import Any, AsyncIterator, Iterable, Iterator, Optional, Sequence, Tuple

from connex_rs._connex_rs import ChannelReceiver, ChannelSender, ChannelStep, Transfer

__all__ = ["Receiver", "Sender", "Step"]

_Part = Tuple[str, Tuple[int, ...], int, int]


# ---- arrays to be sent ---------------------------------------------------------------------------

# Type names by the format characters of the buffer protocol in native sizes (`struct` and PEP 3118).
_FORMATS = {
    "?": "bool",
    "b": "int8",
    "B": "uint8",
    "c": "uint8",
    "h": "int16",
    "H": "uint16",
    "i": "int32",
    "I": "uint32",
    "e": "float16",
    "f": "float32",
    "d": "float64",
    "Zf": "complex64",
    "Zd": "complex128",
    "l": f"int{8 * ctypes.sizeof(ctypes.c_long)}",
    "L": f"uint{8 * ctypes.sizeof(ctypes.c_long)}",
    "q": "int64",
    "Q": "uint64",
    "n": f"int{8 * ctypes.sizeof(ctypes.c_ssize_t)}",
    "N": f"uint{8 * ctypes.sizeof(ctypes.c_size_t)}",
}

# The formats that a memoryview can be cast to, by type name.
_CASTS = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
}


class _PyBuffer(ctypes.Structure):
    """`Py_buffer`, the same in every CPython since 3.0."""

    buf: Optional[int]
    obj: Optional[int]
    len: int
    itemsize: int
    readonly: int
    ndim: int
    format: Optional[bytes]
    shape: Any
    strides: Any
    suboffsets: Any
    internal: Optional[int]

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None

# PyBUF_FORMAT | PyBUF_C_CONTIGUOUS
_WANTED = 0x0004 | 0x0020 | 0x0010 | 0x0008


class _Held:
    """A buffer of an object, held: its memory neither moves nor goes."""

    def __init__(self, obj: Any) -> None:
        self.view = _PyBuffer()
        self.held = False
        _get_buffer(obj, ctypes.byref(self.view), _WANTED)
        self.held = True

    def __del__(self) -> None:
        if self.held:
            _release_buffer(ctypes.byref(self.view))


def _of_buffer(obj: Any, keep: list[Any]) -> _Part:
    try:
        held = _Held(obj)
    except BufferError as error:
        raise ValueError(
            f"an array of type {type(obj).__name__} is not contiguous in row-major order: {error}"
        ) from None
    keep.append(held)
    view = held.view
    text = (view.format or b"B").decode()
    # Native order, said or not; other orders travel under their own name.
    name = _FORMATS.get(text[1:] if text[:1] in "@=" and len(text) > 1 else text, text)
    shape = tuple(view.shape[i] for i in range(view.ndim))
    return name, shape, view.buf or 0, view.len


def _contiguous(shape: Sequence[int], strides: Optional[Sequence[int]], size: int) -> bool:
    """Whether strides, in units of which an element has `size`, are those of row-major order."""
    if strides is None or 0 in shape:
        return True
    expected = size
    for n, stride in zip(reversed(shape), reversed(strides)):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def _of_interface(obj: Any, keep: list[Any]) -> _Part:
    interface = obj.__array_interface__
    shape = tuple(interface["shape"])
    typestr = interface["typestr"]
    size = int(typestr[2:]) * (4 if typestr[1] == "U" else 1)
    if not _contiguous(shape, interface.get("strides"), size):
        raise ValueError("an array is not contiguous in row-major order: copy it first")
    kinds = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
    name = typestr
    if typestr[1] == "b" and size == 1:
        name = "bool"
    elif typestr[1] in "iufc" and typestr[0] in "<|=":
        name = f"{kinds[typestr[1]]}{8 * size}"
    length = size
    for n in shape:
        length *= n
    data = interface.get("data")
    if not isinstance(data, tuple):
        return _of_buffer(obj, keep)
    keep.append(obj)
    return name, shape, data[0], length


def _of_tensor(obj: Any, keep: list[Any]) -> _Part:
    """What has `data_ptr`, `element_size`, `dtype` and `shape`, as PyTorch's tensors do."""
    device = str(getattr(obj, "device", "cpu"))
    if device != "cpu":
        raise ValueError(f"an array on {device}: copy it to host memory first")
    if not obj.is_contiguous():
        raise ValueError("an array is not contiguous in row-major order: call contiguous() first")
    shape = tuple(int(n) for n in obj.shape)
    length = int(obj.element_size())
    for n in shape:
        length *= n
    keep.append(obj)
    return str(obj.dtype).rpartition(".")[2], shape, int(obj.data_ptr()), length


class _DLTensor(ctypes.Structure):
    """`DLTensor` of DLPack."""

    data: Optional[int]
    device_type: int
    device_id: int
    ndim: int
    code: int
    bits: int
    lanes: int
    shape: Any
    strides: Any
    byte_offset: int

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_CPU = 1
_DL_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


def _of_dlpack(obj: Any, keep: list[Any]) -> _Part:
    # A capsule that nobody takes over frees what it holds when it goes.
    capsule = obj.__dlpack__()
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    if tensor.device_type != _DL_CPU:
        raise ValueError(
            f"an array on DLPack device type {tensor.device_type}: copy it to host memory first"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    if not _contiguous(shape, strides, 1):
        raise ValueError("an array is not contiguous in row-major order: copy it first")
    if tensor.code == 6:
        name = "bool"
    elif tensor.code in _DL_CODES and tensor.lanes == 1:
        name = f"{_DL_CODES[tensor.code]}{tensor.bits}"
    else:
        name = f"dlpack:{tensor.code}:{tensor.bits}:{tensor.lanes}"
    length = (tensor.bits * tensor.lanes + 7) // 8
    for n in shape:
        length *= n
    keep.append(capsule)
    return name, shape, (tensor.data or 0) + tensor.byte_offset, length


def _part(obj: Any, keep: list[Any]) -> _Part:
    if hasattr(obj, "data_ptr"):
        return _of_tensor(obj, keep)
    if hasattr(obj, "__array_interface__"):
        return _of_interface(obj, keep)
    try:
        memoryview(obj).release()
    except (TypeError, BufferError):
        if hasattr(obj, "__dlpack__"):
            return _of_dlpack(obj, keep)
        raise TypeError(
            f"{type(obj).__name__} is not an array: it has neither the buffer protocol nor data_ptr, "
            "__array_interface__ or __dlpack__"
        ) from None
    return _of_buffer(obj, keep)


def _parts(arrays: Iterable[Any], keep: list[Any]) -> list[_Part]:
    if isinstance(arrays, (str, bytes, bytearray, memoryview)):
        raise TypeError("arrays must be a list of arrays, not one of them: write [array]")
    return [_part(array, keep) for array in arrays]


# ---- the sending end -----------------------------------------------------------------------------


class Sender:
    """The sending end of a channel. Any number of threads may send on it.

    Dropped without `close`, the receiver gets a failure instead of the end. As a context manager it is closed at the end of the
    block, unless that is left by an exception.
    """

    def __init__(self, native: ChannelSender) -> None:
        self._native = native

    @property
    def name(self) -> str:
        """The name that the channel was opened with."""
        return self._native.name

    @property
    def peer(self) -> tuple[str, int, int, int]:
        """Who receives."""
        return self._native.peer

    @property
    def slot_bytes(self) -> int:
        """Bytes of arrays that fit into one step, each array rounded up to 64."""
        return self._native.slot_bytes

    @property
    def untaken(self) -> list[int]:
        """The correlation numbers of the steps that the receiver has not released, in the order of their sends."""
        return self._native.untaken

    def send(self, arrays: Iterable[Any], corr: int = 0, timeout_ms: Optional[int] = None) -> None:
        """Sends a step and returns when its bytes are in the receiver's memory: the arrays may be reused then.

        Arrays are whatever has the buffer protocol, `__array_interface__`, `data_ptr` or `__dlpack__`, in host memory and
        contiguous. `timeout_ms` (None: forever) bounds the wait for a free slot.

        Raises ValueError for a step that does not fit into a slot, TimeoutError if no slot became free (the channel stays),
        ConnectionError with `untaken` when the channel has failed, RuntimeError after `close`.
        """
        self._native.finish(self.post(arrays, corr, timeout_ms))

    def post(
        self, arrays: Iterable[Any], corr: int = 0, timeout_ms: Optional[int] = None
    ) -> Transfer:
        """As `send`, but returns once the step has a slot and is on its way: several may be in flight.

        The arrays are kept, and must not be changed, until the transfer has ended: when their bytes are in the receiver's
        memory.
        """
        keep: list[Any] = []
        return self._native.post(_parts(arrays, keep), keep, corr, timeout_ms)

    async def send_async(self, arrays: Iterable[Any], corr: int = 0) -> None:
        """As `send`, for an event loop."""
        keep: list[Any] = []
        parts = _parts(arrays, keep)
        while True:
            try:
                transfer = self._native.post(parts, keep, corr, 0)
                break
            except TimeoutError:
                await self._native.changed()
        try:
            await transfer
        except (ConnectionError, TimeoutError):
            # The same end, with what was not taken.
            self._native.finish(transfer)
            raise

    def wait_open(self, timeout_ms: Optional[int] = None) -> None:
        """Waits until the receiver has accepted the channel. There is no need to: `send` waits for it too."""
        self._native.wait_open(timeout_ms)

    def drain(self, timeout_ms: Optional[int] = None) -> None:
        """Waits until the receiver has released every step."""
        self._native.drain(timeout_ms)

    def close(self) -> None:
        """Ends the channel: the receiver gets what was sent, then the end. Idempotent; does not wait."""
        self._native.close()

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"<connex_rs.channel.Sender {self.name!r} to {self.peer}>"


# ---- the receiving end ---------------------------------------------------------------------------


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


class Step(Sequence[Any]):
    """A received step: a sequence of its arrays, as views into the slot that it came in.

    They are NumPy arrays if NumPy is installed and knows the type, else memoryviews.
    """

    def __init__(self, native: ChannelStep) -> None:
        self._native = native
        # None once it is released.
        self._live: Optional[list[_Part]] = native.arrays()
        self._views: list[Any] = [None] * len(self._parts)

    @property
    def _parts(self) -> list[_Part]:
        if self._live is None:
            raise ValueError("the step has been released")
        return self._live

    @property
    def corr(self) -> int:
        """The correlation number that the sender gave it."""
        return self._native.corr

    @property
    def dtypes(self) -> list[str]:
        """The types of its arrays, by name."""
        return [part[0] for part in self._parts]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of its arrays."""
        return [part[1] for part in self._parts]

    def memory(self, index: int) -> memoryview:
        """The bytes of an array, as they are."""
        _, _, address, length = self._parts[index]
        if length == 0:
            return memoryview(b"")
        # The view holds the buffer, and the buffer the step.
        buffer = (ctypes.c_ubyte * length).from_address(address)
        buffer._step = self._native  # type: ignore[attr-defined]
        return memoryview(buffer).cast("B")

    def _view(self, index: int) -> Any:
        name, shape, _, length = self._parts[index]
        memory = self.memory(index)
        numpy = _numpy()
        if numpy is not None:
            try:
                dtype = numpy.dtype(name)
            except (TypeError, ValueError):
                dtype = None
            if dtype is not None and not dtype.hasobject:
                if length == 0:
                    return numpy.empty(shape, dtype)
                return numpy.frombuffer(memory, dtype).reshape(shape)
        cast: Any = _CASTS.get(name)
        if cast is None or length == 0:
            return memory
        return memory.cast(cast, shape) if shape else memory.cast(cast)

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self._parts))[index]
        if self._views[position] is None:
            self._views[position] = self._view(position)
        return self._views[position]

    def release(self) -> None:
        """Frees its slot for the sender, who then writes to the memory of its views. Idempotent."""
        self._views = [None] * len(self._views)
        self._live = None
        self._native.release()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def __repr__(self) -> str:
        if self._live is None:
            return f"<connex_rs.channel.Step {self.corr} released>"
        arrays = ", ".join(f"{name}{list(shape)}" for name, shape, _, _ in self._live)
        return f"<connex_rs.channel.Step {self.corr}: {arrays}>"


class Receiver:
    """The receiving end of a channel: an iterator over its steps, also for `async for`.

    The iteration ends when the sender has closed the channel and all steps have been taken. When the channel has failed, the
    steps that are complete still come, then ConnectionError with `untaken`.
    """

    def __init__(self, native: ChannelReceiver) -> None:
        self._native = native

    @property
    def name(self) -> str:
        """The name that the sender gave the channel."""
        return self._native.name

    @property
    def peer(self) -> tuple[str, int, int, int]:
        """Who sends."""
        return self._native.peer

    @property
    def untaken(self) -> list[int]:
        """The correlation numbers of the steps that are out and not released, in their order."""
        return self._native.untaken

    def recv(self, timeout_ms: Optional[int] = None) -> Optional[Step]:
        """The next step; None at the end of the channel. Raises TimeoutError after `timeout_ms` (None: never, 0: poll)."""
        native = self._native.recv(timeout_ms)
        return None if native is None else Step(native)

    async def recv_async(self) -> Optional[Step]:
        """As `recv`, for an event loop."""
        while True:
            try:
                return self.recv(0)
            except TimeoutError:
                await self._native.changed()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        step = self.recv()
        if step is None:
            raise StopIteration
        return step

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        step = await self.recv_async()
        if step is None:
            raise StopAsyncIteration
        return step

    def close(self) -> None:
        """Takes no more steps: the sender fails, unless it had come to its end. Steps that are held stay. Idempotent."""
        self._native.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
