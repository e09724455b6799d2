"""`python -m hisparse.doctor`: needs as JSON on stdin, findings as JSON on stdout. What runs on the nodes of a cluster."""

import json
import sys

from hisparse.doctor.findings import Needs
from hisparse.doctor.node import examine_node

print(json.dumps([finding.asdict() for finding in examine_node(Needs(**json.load(sys.stdin)))]))
