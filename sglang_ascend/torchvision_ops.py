"""The missing half of a CUDA torchvision beside a CPU build of torch: two operator schemas.

torch calls `define_missing_ops` at the end of its import, through the `torch.backends` entry point.
"""

import ast
import importlib.util
import logging
from pathlib import Path

# What torchvision 0.28 registers fake kernels for at import, whether or not its library loaded.
SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

_kept: list[object] = []  # torch removes the operators of a Library that is garbage collected


def define_missing_ops() -> None:
    """Define the schemas that `import torchvision` needs, where its own library cannot.

    PyPI's torchvision is built for CUDA. Beside a CPU torch (or torch_npu) its library does not
    load, and its import fails on `torchvision::nms`. SGLang imports torchvision before it loads
    plugins, so no SGLang hook comes early enough. Nothing happens when torchvision is absent or a
    CPU build, when torch has CUDA, or when the operator exists. Never raises: an error here would
    break `import torch` for the whole environment.
    """
    try:
        import torch

        if torch.version.cuda is not None or not is_cuda_build(_installed_version_source()):
            return
        missing = [schema for name, schema in SCHEMAS.items() if not is_registered(name)]
        if missing:
            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in missing:
                library.define(schema)
            _kept.append(library)
    except Exception:
        logging.getLogger(__name__).warning(
            "could not define torchvision's operators, so its import may fail", exc_info=True
        )


def is_registered(name: str) -> bool:
    """Whether the dispatcher knows `torchvision::name`; looks without creating the namespace."""
    import torch

    return torch._C._dispatch_has_kernel(f"torchvision::{name}")


def is_cuda_build(version_source: str) -> bool:
    """Whether torchvision's version.py, given as text, names a CUDA build (`0.28.0+cu130`)."""
    for node in ast.parse(version_source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return "+cu" in ast.literal_eval(node.value)
    return False


def _installed_version_source() -> str:
    """The text of the installed torchvision's version.py, found without importing it; may be ''."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return ""
    return Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
