//! Times against sizes, on logarithmic axes: one panel for reads, one for writes.

use std::path::Path;

use plotters::prelude::*;

use crate::aims::{MOONCAKE, NIXL, PERFTEST, PYTHON, SHARED, SHM, SOCKETS, TCP, UCX};
use crate::runs::Runs;

const WIDTH: u32 = 1100;
const HEIGHT: u32 = 560;
/// Sizes of the horizontal axis.
const SIZES: [u64; 7] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    16 << 20,
    64 << 20,
];

/// Draws the plot.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn draw(runs: &Runs, file: &Path) -> anyhow::Result<()> {
    let root = SVGBackend::new(file, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    for (panel, op) in root.split_evenly((1, 2)).iter().zip(["read", "write"]) {
        let series: Vec<(&str, Vec<(f64, f64)>)> = [
            TCP,
            UCX,
            SHM,
            PYTHON,
            SOCKETS,
            SHARED,
            PERFTEST,
            MOONCAKE[0],
            MOONCAKE[1],
            NIXL,
        ]
        .into_iter()
        .map(|runner| (runner, points(runs, runner, op)))
        .filter(|(_, points)| !points.is_empty())
        .collect();
        let times = || {
            series
                .iter()
                .flat_map(|(_, points)| points.iter().map(|point| point.1))
        };
        let low = times().fold(f64::INFINITY, f64::min);
        let high = times().fold(0.0, f64::max);
        if series.is_empty() {
            continue;
        }
        let mut chart = ChartBuilder::on(panel)
            .caption(format!("blocking {op}, median"), ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d((3e3..1e8).log_scale(), (low * 0.7..high * 1.5).log_scale())?;
        chart
            .configure_mesh()
            .x_desc("bytes")
            .y_desc("microseconds")
            .x_label_formatter(&|bytes| format!("{bytes:.0e}"))
            .y_label_formatter(&|us| format!("{us:.0}"))
            .draw()?;
        for (index, (name, points)) in series.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            chart
                .draw_series(LineSeries::new(
                    points.iter().copied(),
                    color.stroke_width(2),
                ))?
                .label(*name)
                .legend(move |(x, y)| {
                    PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2))
                });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
    }
    root.present()?;
    Ok(())
}

/// Size and median time; the best of a runner's modes. `ucx_perftest` has one direction only: it is drawn in both.
fn points(runs: &Runs, runner: &str, op: &str) -> Vec<(f64, f64)> {
    SIZES
        .into_iter()
        .filter_map(|bytes| {
            let median = runs.median(|round| {
                let name = format!("{op}/{bytes}");
                let plain = round
                    .get(runner, &name)
                    .or_else(|| round.least(runner, &format!("{name}/")));
                plain.or_else(|| round.get(runner, &format!("am/{bytes}")))
            })?;
            Some((bytes as f64, median))
        })
        .collect()
}
