from .agreement import Share as Share
from .agreement import alone as alone
from .agreement import run_on_all as run_on_all
from .coordination import join_cluster as join_cluster
from .preflight import passed as passed
from .supervisor import Guard as Guard
