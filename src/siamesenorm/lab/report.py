"""A report of finished runs: report.html to look at, report.json and report.csv to go on from, plots for papers.

records = read_records(find_runs(["runs/compare"]))
write_report(records, analyse(records), "runs/compare", title="Mine")
"""

from __future__ import annotations

from pathlib import Path

from siamesenorm.data.atomic import whole_file, write_json
from siamesenorm.lab.presets import Preset
from siamesenorm.lab.records import Records
from siamesenorm.lab.report_page import make_page
from siamesenorm.lab.rows import as_csv, as_json
from siamesenorm.lab.statistics import Analysis

HTML, JSON, CSV = "report.html", "report.json", "report.csv"


def write_report(
    records: Records, analysis: Analysis, out: Path | str, *, title: str = "", preset: Preset | None = None
) -> Path:
    """Write the three files into a folder; the page's path is returned."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    topologies = records.topologies
    name = title or (f"{len(topologies)} residual topologies compared" if len(topologies) > 1 else topologies[0])
    values = as_json(records, analysis, folder, name, preset)
    write_json(folder / JSON, values)
    with whole_file(folder / CSV) as file:
        file.write(as_csv(values["runs"]).encode())
    with whole_file(folder / HTML) as file:
        file.write(make_page(records, analysis, name, preset, folder).render().encode())
    return folder / HTML
