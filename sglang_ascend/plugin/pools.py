"""KV pools on the CPU: SGLang's device-neutral ones, without their Triton warm-up."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class EmulationMHAPool(MHATokenToKVPool):
    def _init_kv_copy_and_warmup(self) -> None:
        # Slots are only ever moved for trees; a chain's accepted tokens already lie in place.
        self._kv_copy_config = None
