"""Reports on a sharding: bytes per device, collectives of a compiled step, audits of rule tables; text, data, HTML."""

from flax_mesh.sharding.report.account import analyze_sharding_strategy as analyze_sharding_strategy
from flax_mesh.sharding.report.audit import Audit as Audit
from flax_mesh.sharding.report.audit import audit_rules as audit_rules
from flax_mesh.sharding.report.explain import Explanation as Explanation
from flax_mesh.sharding.report.explain import explain_sharding as explain_sharding
from flax_mesh.sharding.report.fingerprint import check_same_on_all_processes as check_same_on_all_processes
from flax_mesh.sharding.report.fingerprint import sharding_fingerprint as sharding_fingerprint
from flax_mesh.sharding.report.hlo import read_collectives as read_collectives
from flax_mesh.sharding.report.hlo import sum_traffic as sum_traffic
from flax_mesh.sharding.report.report import ArrayReport as ArrayReport
from flax_mesh.sharding.report.report import AxisStats as AxisStats
from flax_mesh.sharding.report.report import ShardingReport as ShardingReport
