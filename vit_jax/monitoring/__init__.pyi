from .metric_writer import MetricsCallback as MetricsCallback
from .metric_writer import MetricWriter as MetricWriter
from .metric_writer import last_logged_step as last_logged_step
from .profiler import Trace as Trace
from .summary import banner_lines as banner_lines
from .summary import parameter_table as parameter_table
from .train_metrics import TrainMetrics as TrainMetrics
from .wandb_run import WandbRun as WandbRun
