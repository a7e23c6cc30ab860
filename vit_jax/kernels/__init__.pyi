from .attention import fused_attention as fused_attention
from .attention import plain_attention as plain_attention
from .dispatch import interpret_kernels as interpret_kernels
from .packing import Packing as Packing
from .packing import round_up as round_up
from .tiles import choose_packing as choose_packing
from .vmem import vmem_bytes as vmem_bytes
