from .dumps import Dumps as Dumps
from .dumps import delete_dumps as delete_dumps
from .dumps import dump_environment as dump_environment
from .dumps import dump_folder as dump_folder
from .dumps import other_flags as other_flags
from .kernel_cycles import sum_kernel_cycles as sum_kernel_cycles
from .step_schedule import read_step_schedule as read_step_schedule
