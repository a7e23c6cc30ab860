from .evaluators import Evaluator as Evaluator
from .evaluators import check_fits as check_fits
from .evaluators import due_evaluators as due_evaluators
from .evaluators import make_evaluators as make_evaluators
from .evaluators import run_evaluators as run_evaluators
