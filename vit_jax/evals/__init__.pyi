from .evaluators import check_fits as check_fits
from .evaluators import make as make
from .evaluators import run as run
