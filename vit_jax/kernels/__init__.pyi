from .attention import fused_attention as fused_attention
from .attention import plain_attention as plain_attention
from .dispatch import interpret_kernels as interpret_kernels
from .tiles import ROW_TILE as ROW_TILE
from .vmem import vmem_bytes as vmem_bytes
