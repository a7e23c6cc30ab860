from .config_print import print_config as print_config
from .initial_weights import take_model as take_model
from .run import Run as Run
from .run_end import report_end as report_end
from .teacher import load_teacher as load_teacher
from .teacher import place_teacher as place_teacher
from .workdir import Workdir as Workdir
