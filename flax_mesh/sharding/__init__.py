"""Rule tables, the sharded abstract state, its initialization and placement, sharding constraints, and reports."""

from flax_mesh.sharding.report.audit import Audit as Audit
from flax_mesh.sharding.report.audit import audit_rules as audit_rules
from flax_mesh.sharding.report.explain import Explanation as Explanation
from flax_mesh.sharding.report.fingerprint import check_same_on_all_processes as check_same_on_all_processes
from flax_mesh.sharding.report.fingerprint import sharding_fingerprint as sharding_fingerprint
