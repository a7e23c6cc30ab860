from .accelerators import Finding as Finding
from .accelerators import cluster as cluster
from .accelerators import devices as devices
from .accelerators import has_gpu as has_gpu
from .accelerators import has_tpu as has_tpu
from .accelerators import lock as lock
from .accelerators import room as room
