"""The draft tree and its greedy check: SGLang's own Triton kernels for them, interpreted."""

from __future__ import annotations

from torch import Tensor

from npu_emulation.stand_ins.kernels import custom_operator, kernel, launch

STAND_INS = (
    (
        "`torch.ops.npu.build_tree_kernel_efficient`",
        "`kernels/ops/speculative/spec_tree.py`",
        "SGLang's Triton kernel for XPUs",
    ),
    (
        "`sgl_kernel_npu.sample.verify_tree_greedy.verify_tree_greedy`",
        "`kernels/ops/speculative/spec_tree.py`",
        "SGLang's Triton kernel for XPUs",
    ),
)


@custom_operator(
    "build_tree_kernel_efficient(Tensor parent_list, Tensor selected_index, "
    "Tensor verified_seq_len, Tensor(a!) tree_mask, Tensor(b!) positions, "
    "Tensor(c!) retrive_index, Tensor(d!) retrive_next_token, Tensor(e!) retrive_next_sibling, "
    "int topk, int depth, int draft_token_num, int tree_mask_mode) -> ()"
)
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(
        parent_list,
        selected_index,
        verified_seq_len,
        tree_mask,
        positions,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        topk,
        depth,
        draft_token_num,
        tree_mask_mode,
    )


@kernel("sample.verify_tree_greedy.verify_tree_greedy")
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    launch(
        "verify_tree_greedy",
        verify_tree_greedy_triton,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict,
    )
