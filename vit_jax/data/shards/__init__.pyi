from .files import INFO as INFO
from .files import Found as Found
from .files import find as find
from .files import of_split as of_split
from .files import read as read
from .files import require_room as require_room
from .packing import plan_packing as plan_packing
