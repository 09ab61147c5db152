"""Shards of one process: how an update's tasks are divided, weighted and added."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tiny import regression_stream
from torch import nn

import metaleader as ml
from metaleader.distributed.shards import Shard
from metaleader.gradient.meta import meta_gradient
from metaleader.learners import update_together
from metaleader.learners.sharded import draw_shards
