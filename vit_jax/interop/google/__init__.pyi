from . import augreg as augreg
from . import catalog as catalog
from . import models as models
from .catalog import list_models as list_models
