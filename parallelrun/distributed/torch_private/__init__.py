"""The only package that uses torch's private symbols. Each function says why it needs them."""

from parallelrun.distributed.torch_private.attention import (
    fused_attention,
    fused_attention_backward,
    has_fused_attention,
)
from parallelrun.distributed.torch_private.compiler import (
    import_compiler,
    keep_compiled_buffers,
    uncompiled,
)
from parallelrun.distributed.torch_private.fsdp import (
    empty_parameter,
    fsdp_initialise,
    fsdp_reduce,
)
from parallelrun.distributed.torch_private.groups import (
    default_store,
    device_for_objects,
    gloo_group,
    num_collectives,
    process_groups,
)
from parallelrun.distributed.torch_private.measuring import fused_on_meta
from parallelrun.distributed.torch_private.observers import (
    current_dispatch_modes,
    dispatch_modes,
    is_observed,
    observe,
    observed,
    observers,
)
from parallelrun.distributed.torch_private.pipelines import (
    greet_others_only,
    make_schedule,
    receive_on_demand,
    start_messages,
    trust_metadata,
)
from parallelrun.distributed.torch_private.products import products_of_training, torchs_own_products, use_fast_products
from parallelrun.distributed.torch_private.recurrent import renew_weight_list, swappable_parameters
from parallelrun.distributed.torch_private.tensors import (
    add_all,
    copy_all,
    grouped_product,
    has_grouped_product,
    has_scaled_product,
    multiply,
    norms,
    num_changes,
    reshaped,
    scaled_product,
    silu_backward,
)
from parallelrun.distributed.torch_private.timing import import_profiler, in_stream, phase, timed, timed_waits
