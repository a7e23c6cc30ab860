from .agreement import SINGLE_HOST as SINGLE_HOST
from .agreement import Coordinator as Coordinator
from .agreement import SingleHost as SingleHost
from .agreement import run_on_all as run_on_all
from .coordination import join_cluster as join_cluster
from .gathered_array import GatheredArray as GatheredArray
from .preflight import preflight_checks as preflight_checks
from .supervisor import Supervisor as Supervisor
