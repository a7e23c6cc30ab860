from . import notebook as notebook
from . import plot as plot
