"""Runs when a Python starts with this folder on PYTHONPATH: prepares SGLang for a CPU (see ../README.md)."""

import os
import sys
from importlib.machinery import PathFinder


class _AfterImport:
    """Finds nothing itself: runs a function on certain modules right after their import."""

    def __init__(self, functions):
        self.functions = functions

    def find_spec(self, name, path=None, target=None):
        function = self.functions.get(name)
        spec = PathFinder.find_spec(name, path, target) if function else None
        if spec is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            function(module)

        spec.loader.exec_module = exec_module
        return spec


class _DeclareVisionOps:
    """torchvision's wheels are CUDA builds whose operators do not load beside a CPU torch. What then fails at
    import is that two of them were never declared, so they are declared just before."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                self.library.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__].keep = self  # operators vanish with the library object
        return None


def _attention(module):
    import kvcheck_attention

    kvcheck_attention.PATCHES[module.__name__](module)


sys.meta_path.insert(0, _DeclareVisionOps())
sys.meta_path.insert(
    0,
    _AfterImport(
        {
            "sglang.srt.layers.attention.torch_native_backend": _attention,
            "sglang.srt.speculative.draft_utils": _attention,
        }
    ),
)

# Negative controls of the test-suite: a fault of this name is built into the engine. Its module lies on
# PYTHONPATH too; where it is missing, going on without the fault would make a test pass that proves nothing.
if os.environ.get("KVCHECK_MUTANT"):
    try:
        import kvcheck_mutants
    except ImportError as error:
        print(f"KVCHECK_MUTANT is set, but kvcheck_mutants cannot be imported: {error}", file=sys.stderr)
        os._exit(78)
    kvcheck_mutants.install(os.environ["KVCHECK_MUTANT"])
