"""Pipeline schedules: construction, validation, simulation, search, text and drawings. Pure Python."""

from flax_mesh.mpmd.schedules.draw import draw_schedule_svg as draw_schedule_svg
from flax_mesh.mpmd.schedules.draw import draw_timeline_svg as draw_timeline_svg
from flax_mesh.mpmd.schedules.schedule import Action as Action
from flax_mesh.mpmd.schedules.schedule import Schedule as Schedule
from flax_mesh.mpmd.schedules.schedule import make_schedule as make_schedule
from flax_mesh.mpmd.schedules.search import SearchResult as SearchResult
from flax_mesh.mpmd.schedules.search import search_schedule as search_schedule
from flax_mesh.mpmd.schedules.simulate import Simulation as Simulation
from flax_mesh.mpmd.schedules.simulate import StageCost as StageCost
from flax_mesh.mpmd.schedules.simulate import simulate as simulate
from flax_mesh.mpmd.schedules.text import schedule_table as schedule_table
from flax_mesh.mpmd.schedules.validate import check_schedule as check_schedule
