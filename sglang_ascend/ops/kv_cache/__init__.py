"""Writing keys, values and latents into the paged cache."""

from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.kv_cache import fused, reference
from sglang_ascend.ops.on_npu import npu_body

write_kv = Op("kv_cache.write_kv", reference.write_kv)
write_kv.register(npu_body(fused.write_kv, fused.accepts_kv))
write_latent = Op("kv_cache.write_latent", reference.write_latent)
write_latent.register(npu_body(fused.write_latent, fused.accepts_latent))
