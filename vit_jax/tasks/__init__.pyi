from .choice import make_task as make_task
from .choice import task_of_model as task_of_model
from .class_weights import fields_that_count as fields_that_count
from .classify import Classify as Classify
from .distill import Distill as Distill
from .masked_patches import MaskedPatches as MaskedPatches
from .task import Batch as Batch
from .task import Task as Task
