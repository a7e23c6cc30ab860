from .metric_writer import MetricWriter as MetricWriter
from .metric_writer import Watch as Watch
from .metric_writer import last_step as last_step
from .profiler import Trace as Trace
from .summary import banner_lines as banner_lines
from .summary import parameter_table as parameter_table
from .train_metrics import TrainMetrics as TrainMetrics
