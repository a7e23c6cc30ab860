from .numbers import LEARNING_RATES as LEARNING_RATES
from .numbers import PaperNumber as PaperNumber
from .numbers import PaperRun as PaperRun
from .numbers import find_paper_number as find_paper_number
from .numbers import list_learning_rates as list_learning_rates
from .numbers import read_paper_numbers as read_paper_numbers
from .numbers import read_paper_runs as read_paper_runs
