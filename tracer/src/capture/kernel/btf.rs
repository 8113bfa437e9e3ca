//! Offsets and prototypes of the running kernel, from its BTF.
//!
//! The compiler emits no relocations for the kernel side, so userspace resolves each offset and hands it over.

use std::path::Path;

use btf_rs::{Btf, Type};

/// Where the kernel shows its own BTF.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// Why an offset or a prototype is not known.
#[derive(Debug, thiserror::Error)]
pub enum BtfError {
    /// The file cannot be read or parsed.
    #[error(
        "reading the kernel's type information from {VMLINUX} failed: {0}; the kernel needs CONFIG_DEBUG_INFO_BTF=y"
    )]
    Read(#[source] btf_rs::Error),
    /// Several different structures share the name.
    #[error("the kernel has several different structures named {0}; which one is meant cannot be told")]
    AmbiguousStructure(String),
}

/// The running kernel's types.
pub struct KernelTypes {
    btf: Btf,
}

impl KernelTypes {
    /// Reads the running kernel's BTF.
    ///
    /// # Errors
    ///
    /// When the kernel shows none, or it cannot be parsed.
    pub fn of_running_kernel() -> Result<Self, BtfError> {
        Btf::from_file(Path::new(VMLINUX)).map(|btf| Self { btf }).map_err(BtfError::Read)
    }

    /// Offset in bytes of a member of a structure, `None` where the kernel has no such structure or member.
    /// `path` is a member's name, or several joined by dots; anonymous structures and unions are looked through.
    ///
    /// # Errors
    ///
    /// When several structures of that name disagree.
    pub fn offset_of(&self, structure: &str, path: &str) -> Result<Option<u32>, BtfError> {
        let types = self.btf.resolve_types_by_name(structure).unwrap_or_default();
        let mut found = None;
        for (index, candidate) in types.iter().filter(|kind| matches!(kind, Type::Struct(_))).enumerate() {
            let offset = self.offset_in(candidate, path);
            if index > 0 && offset != found {
                return Err(BtfError::AmbiguousStructure(structure.to_owned()));
            }
            found = offset;
        }
        Ok(found.map(|bits| bits / 8))
    }

    /// Number of arguments of a tracepoint (its `TP_PROTO`), `None` where the kernel has no such tracepoint.
    #[must_use]
    pub fn tracepoint_arguments(&self, tracepoint: &str) -> Option<usize> {
        // The kernel defines `typedef void (*btf_trace_NAME)(void *__data, …)` for each
        // (__DEFINE_EVENT in include/trace/bpf_probe.h).
        let name = format!("btf_trace_{tracepoint}");
        let types = self.btf.resolve_types_by_name(&name).ok()?;
        let Type::Typedef(typedef) = types.into_iter().find(|kind| matches!(kind, Type::Typedef(_)))? else {
            return None;
        };
        let prototype = self.btf.chained_type_iter(&typedef).find_map(|kind| match kind {
            Type::FuncProto(prototype) => Some(prototype),
            _ => None,
        })?;
        prototype.parameters.len().checked_sub(1)
    }

    /// Offset in bits of the member that `path` names.
    fn offset_in(&self, kind: &Type, path: &str) -> Option<u32> {
        let (Type::Struct(structure) | Type::Union(structure)) = kind else { return None };
        let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
        for member in &structure.members {
            let name = self.btf.resolve_name(member).unwrap_or_default();
            if name.is_empty() {
                if let Some(offset) = self.offset_in(&self.plain_type_of(member)?, path) {
                    return Some(member.bit_offset() + offset);
                }
            } else if name == first {
                return match rest {
                    None => Some(member.bit_offset()),
                    Some(rest) => {
                        let inner = self.offset_in(&self.plain_type_of(member)?, rest)?;
                        Some(member.bit_offset() + inner)
                    }
                };
            }
        }
        None
    }

    /// A member's type without qualifiers and typedefs.
    fn plain_type_of(&self, member: &btf_rs::Member) -> Option<Type> {
        let is_plain = |kind: &Type| {
            !matches!(
                kind,
                Type::Const(_) | Type::Volatile(_) | Type::Restrict(_) | Type::Typedef(_) | Type::TypeTag(_)
            )
        };
        self.btf.chained_type_iter(member).find(is_plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> KernelTypes {
        KernelTypes::of_running_kernel().expect("the machine that runs the tests shows its BTF")
    }

    #[test]
    fn members_inside_anonymous_unions_are_found() {
        // struct io_cqe: u64 user_data, s32 res, and an anonymous union that holds fd.
        let (outer, inner) =
            (kernel().offset_of("io_kiocb", "cqe"), kernel().offset_of("io_kiocb", "cqe.fd"));
        let (outer, inner) = (outer.expect("one structure"), inner.expect("one structure"));
        assert_eq!(inner.expect("a member"), outer.expect("a member") + 12);
    }

    #[test]
    fn what_the_kernel_lacks_is_absent_not_zero() {
        assert_eq!(kernel().offset_of("io_kiocb", "no_such_member").expect("one structure"), None);
        assert_eq!(kernel().offset_of("no_such_structure", "a").expect("none at all"), None);
        assert_eq!(kernel().tracepoint_arguments("no_such_tracepoint"), None);
    }

    #[test]
    fn a_tracepoint_has_as_many_arguments_as_its_prototype() {
        assert_eq!(kernel().tracepoint_arguments("sys_enter"), Some(2));
        assert_eq!(kernel().tracepoint_arguments("block_rq_complete"), Some(3));
    }
}
