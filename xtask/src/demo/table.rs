//! The demo's table.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::measure::{Row, Traced};

const HEADER: [&str; 10] = [
    "io_method",
    "run time",
    "EXPLAIN's\nI/O Timings",
    "kernel:\nsum",
    "\np50",
    "\np99",
    "\nmax",
    "\nreads",
    "blocks traced /\nshared read",
    "executed by",
];

/// All rows, aligned, in units for people.
pub(super) fn render(rows: &[Row]) -> Table {
    let mut table = Table::new();
    // One line below the header, and otherwise only space: ten columns have to fit a terminal.
    let style = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));
    table.load_style(style).set_header(HEADER);
    table.add_rows(rows.iter().map(cells));
    for column in table.column_iter_mut() {
        column.set_padding((0, 1));
    }
    for column in table.column_iter_mut().skip(1).take(HEADER.len() - 2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn cells(row: &Row) -> Vec<String> {
    let claims = [row.method.clone(), time(row.run_ms * 1e3), time(row.claimed_ms * 1e3)];
    // "Not measured" is a dash, never a zero.
    let traced = row
        .traced
        .as_ref()
        .map_or_else(|| ["–"; 7].map(str::to_owned), |t| traced_cells(t, row.claimed_blocks));
    claims.into_iter().chain(traced).collect()
}

fn traced_cells(traced: &Traced, claimed_blocks: u64) -> [String; 7] {
    let times = [traced.sum_us, traced.p50_us, traced.p99_us, traced.max_us].map(time);
    let [sum, p50, p99, max] = times;
    let blocks = format!("{} / {claimed_blocks}", traced.blocks);
    [sum, p50, p99, max, traced.reads.to_string(), blocks, traced.executors.clone()]
}

/// Microseconds, three digits, in the unit that a person would choose.
fn time(micros: f64) -> String {
    let (value, unit) = match micros {
        ..1e3 => (micros, "µs"),
        ..1e6 => (micros / 1e3, "ms"),
        _ => (micros / 1e6, "s"),
    };
    let digits = match value {
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_a_fitting_unit() {
        assert_eq!(
            [0.4, 12.34, 1_500.0, 987_654.0, 2_500_000.0].map(time),
            ["0.40 µs", "12.3 µs", "1.50 ms", "988 ms", "2.50 s"]
        );
    }

    #[test]
    fn a_run_without_a_trace_shows_dashes() {
        let row = Row {
            method: "sync".to_owned(),
            run_ms: 900.0,
            claimed_ms: 56.0,
            claimed_blocks: 42_635,
            traced: None,
        };
        assert_eq!(cells(&row)[1..4], ["900 ms", "56.0 ms", "–"]);
    }
}
