//! Aligned tables without borders, described by their columns.

use std::io::{self, Write};

use anstyle::Style;
use comfy_table::{CellAlignment, ContentArrangement, Table};

use crate::units;

/// Rows of a table that the text form shows; a last line says how many more there are. JSON and CSV hold them all.
pub const TOP_ROWS: usize = 20;

/// Printed where a figure was not measured or a name is not known, never a zero or an empty cell.
pub const NOT_MEASURED: &str = "–";

/// What is known, or the mark for what is not.
pub fn known(text: Option<String>) -> String {
    text.unwrap_or_else(|| NOT_MEASURED.to_owned())
}

/// Headings; the stream that is written to strips it where colour is not wanted.
pub const HEADING: Style = Style::new().bold();

/// One column of a table about things of type `T`.
pub struct Column<T> {
    heading: &'static str,
    alignment: CellAlignment,
    cell: fn(&T) -> String,
}

impl<T> Column<T> {
    /// A column of names, aligned left.
    pub const fn name(heading: &'static str, cell: fn(&T) -> String) -> Self {
        Self { heading, alignment: CellAlignment::Left, cell }
    }

    /// A column of figures, aligned right.
    pub const fn figure(heading: &'static str, cell: fn(&T) -> String) -> Self {
        Self { heading, alignment: CellAlignment::Right, cell }
    }
}

/// The cells of one row.
pub fn row<T>(columns: &[Column<T>], item: &T) -> Vec<String> {
    columns.iter().map(|column| (column.cell)(item)).collect()
}

/// Writes an empty line, `title`, the column headings and the first [`TOP_ROWS`] of `items`; nothing when there are none.
pub fn write_table<T>(
    out: &mut dyn Write,
    title: &str,
    columns: &[Column<T>],
    items: &[T],
) -> io::Result<()> {
    if items.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{HEADING}{title}{HEADING:#}")?;
    for (index, line) in lay_out(columns, items).lines().enumerate() {
        let line = line.trim_end();
        if index == 0 {
            writeln!(out, "{HEADING}{line}{HEADING:#}")?;
        } else {
            writeln!(out, "{line}")?;
        }
    }
    let hidden = items.len().saturating_sub(TOP_ROWS);
    if hidden > 0 {
        writeln!(out, "  … {} more", units::count(hidden as u64))?;
    }
    Ok(())
}

/// The headings and the first [`TOP_ROWS`] of `items`, aligned: one line each.
pub fn lay_out<T>(columns: &[Column<T>], items: &[T]) -> String {
    let mut table = Table::new();
    table
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(columns.iter().map(|column| column.heading))
        .add_rows(items.iter().take(TOP_ROWS).map(|item| row(columns, item)));
    table.load_style(comfy_table::presets::NOTHING);
    for (laid_out, column) in table.column_iter_mut().zip(columns) {
        laid_out.set_padding((2, 0));
        laid_out.set_cell_alignment(column.alignment);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column<(&'static str, u64)>; 2] = [
        Column::name("NAME", |item| item.0.to_owned()),
        Column::figure("READS", |item| units::count(item.1)),
    ];

    fn written(items: &[(&'static str, u64)]) -> String {
        let mut out = Vec::new();
        write_table(&mut out, "Things", &COLUMNS, items).expect("a vector takes everything");
        anstream::adapter::strip_str(&String::from_utf8(out).expect("tables are UTF-8")).to_string()
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let expected = "
Things
  NAME    READS
  データ  1,234
  abc         5
";
        assert_eq!(written(&[("データ", 1_234), ("abc", 5)]), expected);
    }

    #[test]
    fn only_the_top_rows_are_shown() {
        let items = vec![("a", 1); TOP_ROWS + 3];
        let text = written(&items);
        assert_eq!(text.lines().filter(|line| line.trim_start().starts_with("a ")).count(), TOP_ROWS);
        assert!(text.ends_with("  … 3 more\n"), "{text}");
    }

    #[test]
    fn a_table_of_nothing_is_nothing() {
        assert_eq!(written(&[]), "");
    }
}
