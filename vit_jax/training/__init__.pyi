from .config_print import print_config as print_config
from .run import Run as Run
from .run_end import report_end as report_end
from .teacher import load_teacher as load_teacher
from .teaching import begin_teaching as begin_teaching
from .workdir import Workdir as Workdir
