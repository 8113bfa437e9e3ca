//! Names that come from the server or from its clients, made safe to print.

use std::borrow::Cow;

/// `name` with everything that could move the cursor or reorder the line written as an escape (`\n`, `\u{1b}`).
///
/// Any client chooses its own `application_name`, and the tool's reader is mostly root at a terminal.
#[must_use]
pub fn printable(name: &str) -> Cow<'_, str> {
    if !name.chars().any(is_unsafe) {
        return Cow::Borrowed(name);
    }
    let mut escaped = String::with_capacity(name.len() + 8);
    for character in name.chars() {
        if is_unsafe(character) {
            escaped.extend(character.escape_default());
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

/// Control characters (C0, DEL, C1), line separators and the marks that change the direction of text.
fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_names_stay_as_they_are() {
        for name in ["", "pgbench", "データ", "naïve \\ \"name\"", "🐘"] {
            assert!(matches!(printable(name), Cow::Borrowed(same) if same == name));
        }
    }

    #[test]
    fn cursor_movements_are_shown_not_done() {
        assert_eq!(printable("a\u{1b}[2Jb\r\n"), r"a\u{1b}[2Jb\r\n");
        assert_eq!(printable("\u{9b}2J\u{7f}"), r"\u{9b}2J\u{7f}");
        assert_eq!(printable("x\u{202e}txt.exe"), r"x\u{202e}txt.exe");
    }
}
