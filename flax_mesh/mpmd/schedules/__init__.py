"""Pipeline schedules: data, validation, simulation, search, text and pictures. Pure Python."""

from flax_mesh.mpmd.schedules.draw import draw_schedule_svg as draw_schedule_svg
from flax_mesh.mpmd.schedules.draw import draw_timeline_svg as draw_timeline_svg
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES as SCHEDULE_NAMES
from flax_mesh.mpmd.schedules.schedule import Action as Action
from flax_mesh.mpmd.schedules.schedule import Schedule as Schedule
from flax_mesh.mpmd.schedules.schedule import dependencies as dependencies
from flax_mesh.mpmd.schedules.schedule import forward_schedule as forward_schedule
from flax_mesh.mpmd.schedules.schedule import make_schedule as make_schedule
from flax_mesh.mpmd.schedules.search import SearchResult as SearchResult
from flax_mesh.mpmd.schedules.search import search_schedule as search_schedule
from flax_mesh.mpmd.schedules.simulate import Costs as Costs
from flax_mesh.mpmd.schedules.simulate import Simulation as Simulation
from flax_mesh.mpmd.schedules.simulate import StageCost as StageCost
from flax_mesh.mpmd.schedules.simulate import peak_activations as peak_activations
from flax_mesh.mpmd.schedules.simulate import simulate as simulate
from flax_mesh.mpmd.schedules.simulate import stage_costs as stage_costs
from flax_mesh.mpmd.schedules.text import schedule_table as schedule_table
from flax_mesh.mpmd.schedules.validate import check_schedule as check_schedule
from flax_mesh.mpmd.schedules.validate import memory_limits as memory_limits
