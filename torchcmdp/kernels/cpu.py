"""Compile kernels for the CPU, once for all files, and say so."""

from __future__ import annotations

import gc
import hashlib
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import Linkage, create_pass_builder, create_pipeline_tuning_options
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler import Compiler, Flags
from numba.core.typed_passes import NativeLowering

from torchcmdp.kernels.lowering import KernelLowering, with_memory, with_records

# No "nnan"/"ninf": -inf is a legal logarithm here.
FASTMATH = {"contract", "reassoc", "nsz"}


@lru_cache(maxsize=1)
def _stamp() -> str:
    """A digest of every kernel file: a kernel is compiled into its callers, so an edit of any file ages all."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Progress:
    """What is said while kernels are compiled: on a terminal one line that is kept up to date, elsewhere one a kernel."""

    def __init__(self) -> None:
        self._started, self._done = 0.0, 0

    def begin(self, name: str) -> None:
        """A kernel is not in the cache."""
        if not self._started:
            self._started = time.monotonic()
            self._say("compiling kernels, once for this version: this takes up to a minute", last=not sys.stderr.isatty())
        elif sys.stderr.isatty():
            self._say(f"compiling kernels, once for this version: {self._done} done, {self._seconds:.0f} s, now {name}")

    def end(self, name: str) -> None:
        """It is now."""
        self._done += 1
        told = f"{name} is compiled, {self._done} done, {self._seconds:.0f} s"
        self._say(f"compiling kernels, once for this version: {told}", last=not sys.stderr.isatty())

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _say(self, text: str, last: bool = False) -> None:
        print(text if last else f"\r\033[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)


_progress = _Progress()


class _KernelFiles(IndexDataCacheFile):  # type: ignore[misc]
    """One file for each signature, named after the kernel files and the signature.

    Numba numbers its files and keeps an index of them: two processes that compile two signatures of a kernel at once may give both
    the same number, and a third one then calls the code of the one with the arguments of the other.
    """

    def _name(self, key: Any) -> str:
        digest = hashlib.sha256(repr((numba.__version__, self._source_stamp, key)).encode()).hexdigest()
        return f"{self._index_name.removesuffix('.nbi')}.{self._source_stamp[:12]}.{digest[:24]}.nbc"

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(self._name(key))
        except FileNotFoundError:
            return None

    def save(self, key: Any, data: Any) -> None:
        kernel = self._index_name.partition("-")[0]
        for path in Path(self._cache_path).glob(f"{kernel}-*.nb[ci]"):
            if f".{self._source_stamp[:12]}." not in path.name:  # of older kernel files
                path.unlink(missing_ok=True)
        self._save_data(self._name(key), data)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache on disk, with the stamp of all kernel files; says on stderr what is not in it and so is compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._kernel = function.__name__
        self._cache_file = _KernelFiles(self._cache_path, self._impl.filename_base, _stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:
            _progress.begin(self._kernel)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        super().save_overload(sig, data)
        _progress.end(self._kernel)


# Passes of Numba's compiler that find nothing in kernels, which have no closures, literals, array expressions or raised errors.
UNUSED = {
    "WithLifting", "InlineClosureLikes", "RewriteSemanticConstants", "DeadBranchPrune", "RewriteDynamicRaises",
    "MakeFunctionToJitFunction", "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads",
    "NopythonRewrites", "NoPythonSupportedFeatureValidation", "AnnotateTypes", "DumpParforDiagnostics",
}  # fmt: skip


class _Flags(Flags):  # type: ignore[misc]
    """Options that no longer change, one object for all that are equal, so that nobody has to compare them.

    Numba looks its overloads up by them, and its own hash is the same for all options.
    """

    __slots__ = ()

    def copy(self) -> _Flags:
        return self

    __hash__ = object.__hash__
    __eq__ = object.__eq__


_flags: dict[str, _Flags] = {}


class _Compiler(Compiler):  # type: ignore[misc]
    """Numba's compiler without what kernels do not need, with a library that a subclass makes."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        self.state.typingctx = with_memory(self.state.typingctx)
        self.state.targetctx = with_records(self.state.targetctx)
        self.state.library = self.new_library(func)
        flags = self.state.flags
        self.state.flags = _flags.setdefault(repr(flags), _Flags(flags))
        # nothing is freed before the end, and looking for it again and again takes a tenth of the time
        collecting = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(func)
        finally:
            if collecting:
                gc.enable()

    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            kept = [each for each in pipeline.passes if each[0].__name__ not in UNUSED]
            pipeline.passes = [(KernelLowering, why) if each is NativeLowering else (each, why) for each, why in kept]
        return pipelines


class _Unlinked:
    """A code generator that neither optimises nor emits: for functions that only ever run inside another."""

    def __init__(self, codegen: Any) -> None:
        self._real = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _add_module(self, module: Any) -> None: ...

    def set_env(self, name: str, environment: Any) -> None: ...


def _simplify(library: Any, module: Any) -> None:
    """The passes that Numba runs over each function of a module, here without those that are only declared."""
    module.data_layout = library._codegen._data_layout
    for function in module.functions:
        if not function.is_declaration:
            passes, builder = library._codegen._function_pass_manager()
            passes.run(function, builder)


class _InnerCompiler(_Compiler):
    """Numba optimises a function again in every caller of its callers; this one leaves it to the outermost."""

    def new_library(self, func: Callable[..., Any]) -> Any:
        library = self.state.targetctx.codegen().create_library(func.__qualname__)
        library._codegen = _Unlinked(library._codegen)
        library._optimize_functions = partial(_simplify, library)
        library._optimize_final_module = lambda: None
        return library


class _EntryCompiler(_Compiler):
    """Makes the functions that were linked in private to the entry: they lose the arguments and copies that nobody needs."""

    def new_library(self, func: Callable[..., Any]) -> Any:
        library = self.state.targetctx.codegen().create_library(func.__qualname__)
        library.enable_object_caching()

        def privately() -> None:
            for linked in library._final_module.functions:
                if not linked.is_declaration and linked.linkage == Linkage.linkonce_odr:
                    linked.linkage = Linkage.internal
            # once: Numba's first round is for reference counts, which kernels do not have. Unrolled and vectorised loops are
            # a third more to optimise and to emit, and no faster where most are a few successors or constraints long
            tuning = create_pipeline_tuning_options(3)
            tuning.loop_vectorization, tuning.loop_unrolling = False, False
            # what stands side by side in the code goes side by side, which llvmlite leaves out unless asked to
            tuning.slp_vectorization = True
            builder = create_pass_builder(library._codegen._tm, tuning)
            builder.getModulePassManager().run(library._final_module, builder)

        library._optimize_functions = partial(_simplify, library)
        library._optimize_final_module = privately
        return library


OPTIONS = {"nogil": True, "fastmath": FASTMATH, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def compiled(function: Callable[..., Any], **changes: Any) -> Any:
    """Compile a kernel that other kernels call; `changes` are to the options of all kernels."""
    return njit(pipeline_class=_InnerCompiler, **{**OPTIONS, "no_cpython_wrapper": True, **changes})(function)


def exposed(function: Callable[..., Any], **changes: Any) -> Any:
    """Compile a kernel that Python calls, with all that it calls, on its first call."""
    return njit(pipeline_class=_EntryCompiler, **{**OPTIONS, **changes})(function)


def entry(function: Callable[..., Any], **changes: Any) -> Any:
    """As `exposed`, or load it from the cache."""
    dispatcher = exposed(function, **changes)
    dispatcher._cache = _KernelCache(function)
    return dispatcher
