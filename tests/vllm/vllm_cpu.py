"""PyTorch versions of the operators that the GPU wheel of vLLM lacks on a CPU (`VLLM_TARGET_DEVICE=cpu`)."""

import torch

_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def register():
    """Define the operators that the CPU worker of vLLM calls and that no native library defines."""
    from vllm.triton_utils.dispatcher import register_kernels

    if not hasattr(torch.ops._C, "init_cpu_memory_env"):
        _LIBRARY.define("init_cpu_memory_env(int[] nodes) -> ()")
        _LIBRARY.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
        _LIBRARY.define("greedy_argmax(Tensor logits) -> Tensor")
        _LIBRARY.impl("greedy_argmax", lambda logits: logits.argmax(dim=-1).view(-1), "CPU")
        _LIBRARY.define("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor")
        _LIBRARY.impl("fused_gumbel_argmax", _sample, "CPU")
    # vLLM counts slots of keys and values, which a model without attention does not have.
    register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": _no_slots})


def _sample(logits, seeds):
    generators = [torch.Generator().manual_seed(int(seed) % 2**63) for seed in seeds]
    noise = [torch.empty_like(x).exponential_(generator=g) for x, g in zip(logits, generators, strict=True)]
    return (logits.softmax(-1) / torch.stack(noise)).argmax(dim=-1)


def _no_slots(
    num_tokens, max_num_tokens, query_start_loc_ptr, positions_ptr, block_table_ptr, block_table_stride,
    slot_mapping_ptr, KV_CACHE_BLOCK_SIZE, TOTAL_CP_WORLD_SIZE, TOTAL_CP_RANK, CP_KV_CACHE_INTERLEAVE_SIZE, PAD_ID,
    BLOCK_SIZE,
):  # fmt: skip
    slot_mapping_ptr.fill_(PAD_ID)
