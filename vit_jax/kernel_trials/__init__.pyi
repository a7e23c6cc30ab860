from .correctness import COMPARISONS as COMPARISONS
from .correctness import TOLERANCE as TOLERANCE
from .correctness import check_kernels as check_kernels
from .times import PLAIN as PLAIN
from .times import AttentionTime as AttentionTime
from .times import remember_times as remember_times
from .times import settle_attention as settle_attention
