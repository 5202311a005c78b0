"""An emulated Ascend under the real torch_npu, for development and CI: docs/ascend-emulation.md."""
