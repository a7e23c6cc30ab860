from . import bars as bars
from . import figures as figures
from . import look_page as look_page
from . import measure as measure
from . import notebook as notebook
from . import observe as observe
from . import page as page
from . import plot as plot
