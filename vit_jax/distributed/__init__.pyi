from .coordination import SINGLE_HOST as SINGLE_HOST
from .coordination import Coordinator as Coordinator
from .coordination import current_group as current_group
from .coordination import join_cluster as join_cluster
from .coordination import run_on_all as run_on_all
from .preflight import check_equal as check_equal
from .preflight import preflight_checks as preflight_checks
from .supervisor import Supervisor as Supervisor
