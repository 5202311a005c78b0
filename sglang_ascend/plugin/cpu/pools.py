"""The KV pools on the CPU: SGLang's device-neutral ones, without what they have for Triton."""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, MLATokenToKVPool


class EmulationMHAPool(MHATokenToKVPool):
    def _init_kv_copy_and_warmup(self) -> None:
        # Slots are only ever moved for trees; a chain's accepted tokens already lie in place.
        self._kv_copy_config = None

    def _create_buffers_normal(self) -> None:
        k_shape, v_shape = self._kv_buffer_shapes()
        self.k_buffer = [_zeros(k_shape, self.store_dtype) for _ in range(self.layer_num)]
        self.v_buffer = [_zeros(v_shape, self.store_dtype) for _ in range(self.layer_num)]


class EmulationMLAPool(MLATokenToKVPool):
    def _scatter_mla_rows(
        self,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        """SGLang's own, without Triton, takes ten times as long at a few rows."""
        dst_buffer[loc] = torch.cat((cache_k_nope, cache_k_rope), dim=-1)


class EmulationPools(KVCacheConfigurator):
    """Makes these pools where SGLang would make the Ascend ones, which write through torch_npu."""

    def _build_ascend_mha_kv_pool(self, *, max_total_num_tokens: int) -> KVCache:
        return self._build_mha_kv_pool(
            max_total_num_tokens=max_total_num_tokens,
            mha_pool_class=EmulationMHAPool,
            quant_method=None,
        )

    def _build_ascend_mla_kv_pool(
        self, *, max_total_num_tokens: int, is_dsa_model: bool
    ) -> KVCache:
        """Sparse attention (DSA) has no CPU path."""
        if is_dsa_model:
            raise ValueError(
                "DeepSeek sparse attention is not served on CPU: choose a dense MLA model."
            )
        return self._build_mla_kv_pool(
            max_total_num_tokens=max_total_num_tokens, mla_pool_class=EmulationMLAPool
        )


# Of x86 and of most ARM systems.
HUGE_PAGE = 2 << 20


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeroed memory that the host provides page by page as slots are first used.

    ``torch.zeros`` writes all of it: 10 s of a server's start for 3 GB of slots. Where a huge page
    begins the host provides thousands of slots at once (NumPy asks for these), not ten.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    held = np.zeros(num_bytes + HUGE_PAGE, np.uint8)
    start = -held.ctypes.data % HUGE_PAGE
    return torch.from_numpy(held[start : start + num_bytes]).view(dtype).view(shape)
