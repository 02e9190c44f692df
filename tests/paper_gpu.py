"""A simulated GPU, for a torch without CUDA: its tensors say they are on CUDA and keep their data
on the CPU. Every call of torch passes `__torch_function__`: ours refuses a mix of devices, and
counts operations and waits. It cannot see kernels, streams, capture and timing,
nor where CUDA rounds differently from a CPU."""
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

ROOT = Path(__file__).resolve().parent.parent
FACTS = {Tensor.device.__get__: torch.device("cuda", 0), Tensor.is_cuda.__get__: True,
         Tensor.is_cpu.__get__: False}
# these use no values
MENTIONS = {torch.device, torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type}
# these copy from one device to another
COPIES = {Tensor.to, Tensor.cpu, Tensor.copy_, torch.tensor, torch.as_tensor}
# these depend on values
ANSWERS = {"tolist", "item", "nonzero", "argwhere", "equal", "allclose", "masked_select", "unique",
           "bincount", "__bool__", "__int__", "__float__", "__index__", "__contains__"}


class Paper(Tensor):
    """A tensor of the paper GPU: in truth one of the CPU. Only its type tells where it is."""
    __torch_function__ = torch._C._disabled_torch_function_impl


class Pinned(Tensor):
    """A tensor of the host which the paper GPU fetches without making the host wait."""
    __torch_function__ = torch._C._disabled_torch_function_impl


def paper(x):
    return x.as_subclass(Paper) if type(x) is Tensor else x


def flat(x):
    """All that lists and tuples within each other hold."""
    return [y for part in x for y in flat(part)] if isinstance(x, (list, tuple)) else [x]


def place(t):
    return "cuda" if isinstance(t, Paper) else "cpu"


def device_name(x):
    """Of an argument that is a device or names one: "cpu" or "cuda"."""
    name = str(x).split(":")[0] if isinstance(x, (str, torch.device)) else None
    return name if name in ("cpu", "cuda") else None


def asks(name, args):
    """Does this call make the host wait for values? So does an index that is a mask, since only the
    values tell how many are picked, and one that is a list,
    since it is first copied to the device."""
    index = args[1] if name == "__getitem__" else ()
    return name in ANSWERS or any(isinstance(i, list) or isinstance(i, Tensor)
                                  and i.dtype == torch.bool
                                  for i in (index if isinstance(index, tuple) else (index,)))


class PaperGPU(TorchFunctionMode):
    """`with PaperGPU() as gpu:` there is a CUDA device. gpu.operations: how many tensor operations
    each device ran, without views; gpu.waits: for each time that the host waited for the GPU, which
    line of this repository called what, such as "speculative.py:210 item"."""

    def __init__(self):
        super().__init__()
        self.operations, self.waits, self.sync_debug_mode = {"cpu": 0, "cuda": 0}, [], "default"

    def __enter__(self):
        self.patches, future = ExitStack(), torch.__future__
        self.patches.enter_context(patch.multiple(
            torch.cuda, is_available=lambda: True, device_count=lambda: 1,
            get_device_name=lambda device: "a GPU on paper",
            synchronize=lambda device=None: self.wait("synchronize"),
            set_sync_debug_mode=partial(setattr, self, "sync_debug_mode")))
        # trap: by default a module that moves keeps its parameters, and so their type,
        # and swaps their data
        self.patches.callback(future.set_overwrite_module_params_on_conversion,
                              future.get_overwrite_module_params_on_conversion())
        future.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.close()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__, kwargs or {}
        leaves = flat([*args, *kwargs.values()])
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        here = any(isinstance(t, Paper) for t in tensors)
        named = "cpu" if func is Tensor.cpu else next(filter(None, map(device_name, leaves)), None)
        if func in MENTIONS:
            return func(*args, **kwargs)
        if func is Tensor.pin_memory:
            return args[0].clone().as_subclass(Pinned)
        if here and func in FACTS:
            return FACTS[func]
        if here and name in ("numpy", "__array__"):
            raise TypeError("a tensor on CUDA cannot become an array of numpy: copy it to the CPU "
                            "first")
        stand_in = next((x for x in leaves if isinstance(x, torch.nn.Module)), None)
        # machine/quant.py: what it does in place of this call is seen one by one
        if stand_in is not None:
            super().__enter__()
            try:
                return stand_in.__torch_function__(func, types, args, kwargs)
            finally:
                super().__exit__(None, None, None)
        goes = named or ("cuda" if here else "cpu")
        if func in COPIES:
            goes = self.copy(func, args, kwargs, tensors, named)
        elif here and any(t.dim() > 0 and not isinstance(t, Paper) for t in tensors):
            raise RuntimeError(f"{name}: all tensors must be on one device, not on cuda and the "
                               "cpu at once")
        elif here and asks(name, args):
            self.wait(name)
        if named:
            args, kwargs = tree_map(lambda x: "cpu" if device_name(x) else x, (args, kwargs))
        return self.book(name, tensors, func(*args, **kwargs), goes)

    def copy(self, func, args, kwargs, tensors, named):
        """Where a copy goes. On the way from one device to the other the host waits, unless the GPU
        fetches a pinned tensor."""
        into = func is Tensor.copy_
        source = tensors[into] if tensors else None
        goes = place(tensors[0]) if into else named or place(tensors[-1] if tensors else None)
        free = (isinstance(source, Pinned)
                and (kwargs.get("non_blocking") or any(a is True for a in args[1:])))
        if place(source) != goes and not free:
            self.wait(func.__name__)
        return goes

    def book(self, name, tensors, out, goes):
        """Count a call, and return what came out of it, at the place to which it `goes`. A call is
        a view if it only returns memory that it was given,
        and neither writes there nor has to leave."""
        if isinstance(out, Tensor) and place(out) != goes and any(out is t for t in tensors):
            out = out.clone()   # here `to` had nothing to do, elsewhere it copies
        made = [t for t in flat(out) if isinstance(t, Tensor)]
        given = {t.untyped_storage().data_ptr() for t in tensors}
        new = any(t.untyped_storage().data_ptr() not in given for t in made)
        writes = name == "__setitem__" or name.endswith("_") and not name.endswith("__")
        where = "cuda" if "cuda" in (goes, *map(place, tensors)) else "cpu"
        self.operations[where] += (new or writes)
        if goes == "cpu":
            return out
        return tree_map(paper, out) if isinstance(out, (list, tuple)) else paper(out)

    def wait(self, what):
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        frame = sys._getframe()
        while frame and not is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        self.waits.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {what}"
                          if frame else what)


def is_ours(file):
    return file.startswith(str(ROOT)) and "site-packages" not in file and file != __file__


class Clock(PaperGPU):
    """A paper GPU with a clock, in microseconds. The host pays for each call of a function and for
    each launch; the device runs behind it, kernel after kernel; and a wait lets the host catch up.
    So what takes time on the host, such as choosing a draft, is charged as it would be, and no test
    depends on timing. `time.perf_counter` shows the host's time."""
    CALL, LAUNCH, KERNEL, WAIT = 0.15, 6.0, 2.0, 10.0

    def __enter__(self):
        self.host = self.device = 0.0
        super().__enter__()
        self.patches.enter_context(patch.object(time, "perf_counter", lambda: 1e-6 * self.host))
        sys.setprofile(self.called)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        super().__exit__(*error)

    def called(self, frame, event, arg):
        self.host += self.CALL * (event in ("call", "c_call"))

    def __torch_function__(self, *call):
        sys.setprofile(None)
        try:
            return super().__torch_function__(*call)
        finally:
            sys.setprofile(self.called)

    def book(self, name, tensors, out, goes):
        before = self.operations["cuda"]
        out = super().book(name, tensors, out, goes)
        if self.operations["cuda"] > before:
            self.launch(self.KERNEL)
        return out

    def launch(self, micros):
        self.host += self.LAUNCH
        self.device = max(self.device, self.host) + micros

    def wait(self, what):
        self.host = max(self.host, self.device) + self.WAIT

    def replay(self, compute, micros):
        """What a graph does: one launch, for all that it computes."""
        sys.setprofile(None)
        TorchFunctionMode.__exit__(self, None, None, None)
        compute()
        TorchFunctionMode.__enter__(self)
        self.launch(micros)
        sys.setprofile(self.called)
