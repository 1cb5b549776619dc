"""Changes lines of vLLM while it is imported, to test a detector against a fault that it must find.

Put this folder on PYTHONPATH and the changes into KVCHECK_VLLM_PATCH, a JSON list of {"module", "old", "new"}.
Each old text must stand in its module exactly once; where it does not, the import fails and so does the server:
a mutant that changes nothing must never look like a clean run. Without the variable nothing happens.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys


class PatchedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source with some of the text replaced, and from no cached bytecode."""

    changes = ()

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        text = self.get_data(path).decode("utf-8")
        for change in self.changes:
            found = text.count(change["old"])
            if found != 1:
                raise ImportError(f"{path}: expected exactly once, found {found} times: {change['old']!r}")
            text = text.replace(change["old"], change["new"])
        print(f"kvcheck: {len(self.changes)} changes in {fullname}", file=sys.stderr, flush=True)
        return compile(text, path, "exec", dont_inherit=True)


class PatchFinder(importlib.abc.MetaPathFinder):
    """Hands the modules that are to be changed to the loader above, and leaves all others alone."""

    def __init__(self, changes):
        self._changes = changes

    def find_spec(self, fullname, path=None, target=None):
        changes = [change for change in self._changes if change["module"] == fullname]
        if not changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = PatchedLoader(fullname, spec.origin)
            spec.loader.changes = changes
        return spec


if os.environ.get("KVCHECK_VLLM_PATCH"):
    sys.meta_path.insert(0, PatchFinder(json.loads(os.environ["KVCHECK_VLLM_PATCH"])))
