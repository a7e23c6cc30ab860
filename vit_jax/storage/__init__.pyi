from . import cache as cache
from . import filesystem as filesystem
from .mirror import check_apart as check_apart
from .mirror import check_place as check_place
from .mirror import open_mirror as open_mirror
from .timeout import TIMEOUT as TIMEOUT
from .timeout import Progress as Progress
from .timeout import call_with_timeout as call_with_timeout
