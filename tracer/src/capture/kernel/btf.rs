//! Offsets and prototypes of the running kernel, from its BTF.
//!
//! The compiler emits no relocations for the kernel side, so userspace resolves each offset and hands it over. aya
//! keeps its own parser's members to itself, and the one well-kept crate for this is LGPL; what is needed of the
//! format (`include/uapi/linux/btf.h`, Documentation/bpf/btf.rst) is little.

use std::{collections::HashMap, fs, io};

use zerocopy::{FromBytes, Immutable, KnownLayout};

/// Where the kernel shows its own BTF.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// Deepest nesting of anonymous members, typedefs and qualifiers that is followed: a damaged file may have cycles.
const DEEPEST: u32 = 32;

/// Why an offset or a prototype is not known.
#[derive(Debug, thiserror::Error)]
pub enum BtfError {
    /// The file cannot be read.
    #[error(
        "reading the kernel's type information from {VMLINUX} failed: {0}; the kernel needs CONFIG_DEBUG_INFO_BTF=y"
    )]
    Read(#[source] io::Error),
    /// The file cannot be understood.
    #[error("the kernel's type information in {VMLINUX} is not of a known form ({0}); use a newer pgiotrace")]
    Format(&'static str),
    /// Several different structures share the name.
    #[error("the kernel has several different structures named {0}; which one is meant cannot be told")]
    AmbiguousStructure(String),
}

/// `struct btf_header`, in the machine's own byte order.
#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: u16,
    version: u8,
    flags: u8,
    own_length: u32,
    type_offset: u32,
    type_length: u32,
    string_offset: u32,
    string_length: u32,
}

const MAGIC: u16 = 0xeb9f;

/// `struct btf_type`, followed by what its kind says.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Type {
    name: u32,
    /// vlen in bits 0 to 15, kind in bits 24 to 28, kind_flag in bit 31.
    info: u32,
    /// The type that it refers to, or its size.
    target: u32,
}

/// `struct btf_member`.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Member {
    name: u32,
    type_id: u32,
    /// With kind_flag: the offset in bits 0 to 23, the bit field's size above.
    offset: u32,
}

/// `BTF_KIND_…`.
mod kind {
    pub const PTR: u32 = 2;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const TYPEDEF: u32 = 8;
    pub const VOLATILE: u32 = 9;
    pub const CONST: u32 = 10;
    pub const RESTRICT: u32 = 11;
    pub const FUNC_PROTO: u32 = 13;
    pub const TYPE_TAG: u32 = 18;
}

impl Type {
    fn kind(self) -> u32 {
        self.info >> 24 & 0x1f
    }

    fn length(self) -> usize {
        (self.info & 0xffff) as usize
    }

    fn has_kind_flag(self) -> bool {
        self.info >> 31 == 1
    }

    /// Bytes that follow the type; `None` for a kind that is not known.
    fn tail_bytes(self) -> Option<usize> {
        Some(match self.kind() {
            // INT, VAR, DECL_TAG
            1 | 14 | 17 => 4,
            // ARRAY
            3 => 12,
            // STRUCT, UNION, DATASEC, ENUM64
            4 | 5 | 15 | 19 => 12 * self.length(),
            // ENUM, FUNC_PROTO
            6 | 13 => 8 * self.length(),
            // PTR, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FLOAT, TYPE_TAG
            2 | 7..=12 | 16 | 18 => 0,
            _ => return None,
        })
    }
}

/// The running kernel's types.
pub struct KernelTypes {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Where each type starts in `types`, by its id less one: id 0 is void.
    starts: Vec<u32>,
    /// Ids of structures by name.
    structures: HashMap<Vec<u8>, Vec<u32>>,
    /// Ids of the typedefs that describe tracepoints, by the tracepoint's name.
    tracepoints: HashMap<Vec<u8>, u32>,
}

impl KernelTypes {
    /// Reads the running kernel's BTF.
    ///
    /// # Errors
    ///
    /// When the kernel shows none, or it is not understood.
    pub fn of_running_kernel() -> Result<Self, BtfError> {
        Self::parse(&fs::read(VMLINUX).map_err(BtfError::Read)?)
    }

    fn parse(bytes: &[u8]) -> Result<Self, BtfError> {
        let (header, _) = Header::read_from_prefix(bytes).map_err(|_| BtfError::Format("no header"))?;
        if header.magic != MAGIC || header.version != 1 {
            return Err(BtfError::Format("unknown magic or version"));
        }
        let section = |offset: u32, length: u32| {
            let start = header.own_length as usize + offset as usize;
            let found = bytes.get(start..start.saturating_add(length as usize));
            found.map(<[u8]>::to_vec).ok_or(BtfError::Format("a section lies outside"))
        };
        let mut parsed = Self {
            types: section(header.type_offset, header.type_length)?,
            strings: section(header.string_offset, header.string_length)?,
            starts: Vec::new(),
            structures: HashMap::new(),
            tracepoints: HashMap::new(),
        };
        parsed.index()?;
        Ok(parsed)
    }

    /// Walks over all types once.
    fn index(&mut self) -> Result<(), BtfError> {
        let mut start = 0;
        while start < self.types.len() {
            let header = self.header_at(start).ok_or(BtfError::Format("a type is cut off"))?;
            let tail = header.tail_bytes().ok_or(BtfError::Format("a kind of type is unknown"))?;
            self.starts.push(u32::try_from(start).map_err(|_| BtfError::Format("it is too large"))?);
            let id = u32::try_from(self.starts.len()).map_err(|_| BtfError::Format("it is too large"))?;
            let name = self.string(header.name);
            match header.kind() {
                kind::STRUCT if !name.is_empty() => {
                    let name = name.to_vec();
                    self.structures.entry(name).or_default().push(id);
                }
                // The kernel defines `typedef void (*btf_trace_NAME)(void *__data, …)` for each tracepoint
                // (__DEFINE_EVENT in include/trace/bpf_probe.h).
                kind::TYPEDEF => {
                    if let Some(name) = name.strip_prefix(b"btf_trace_") {
                        let name = name.to_vec();
                        self.tracepoints.insert(name, id);
                    }
                }
                _ => {}
            }
            start += size_of::<Type>() + tail;
        }
        Ok(())
    }

    /// Offset in bytes of a member of a structure, `None` where the kernel has no such structure or member.
    /// `path` is a member's name, or several joined by dots; anonymous structures and unions are looked through.
    ///
    /// # Errors
    ///
    /// When several structures of that name disagree.
    pub fn offset_of(&self, structure: &str, path: &str) -> Result<Option<u32>, BtfError> {
        let ids = self.structures.get(structure.as_bytes()).map_or(&[][..], Vec::as_slice);
        let mut offsets = ids.iter().map(|id| self.offset_in(*id, path, DEEPEST));
        let Some(first) = offsets.next() else { return Ok(None) };
        if offsets.any(|offset| offset != first) {
            return Err(BtfError::AmbiguousStructure(structure.to_owned()));
        }
        Ok(first.map(|bits| bits / 8))
    }

    /// Size in bytes of a structure, `None` where the kernel has none of that name.
    #[must_use]
    pub fn size_of(&self, structure: &str) -> Option<u32> {
        let ids = self.structures.get(structure.as_bytes())?;
        Some(self.type_of(*ids.first()?)?.target)
    }

    /// Number of arguments of a tracepoint (its `TP_PROTO`), `None` where the kernel has no such tracepoint.
    #[must_use]
    pub fn tracepoint_arguments(&self, tracepoint: &str) -> Option<usize> {
        let typedef = self.type_of(*self.tracepoints.get(tracepoint.as_bytes())?)?;
        let pointer = self.type_of(typedef.target).filter(|pointer| pointer.kind() == kind::PTR)?;
        let prototype = self.type_of(pointer.target).filter(|found| found.kind() == kind::FUNC_PROTO)?;
        // The first is `__data`, the program's own.
        prototype.length().checked_sub(1)
    }

    /// Offset in bits of the member that `path` names.
    fn offset_in(&self, id: u32, path: &str, depth: u32) -> Option<u32> {
        let depth = depth.checked_sub(1)?;
        let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
        for (member, bits) in self.members(self.plain(id)?)? {
            let name = self.string(member.name);
            let inner = if name.is_empty() {
                self.offset_in(member.type_id, path, depth)
            } else if name == first.as_bytes() {
                rest.map_or(Some(0), |rest| self.offset_in(member.type_id, rest, depth))
            } else {
                None
            };
            if let Some(inner) = inner {
                return bits.checked_add(inner);
            }
        }
        None
    }

    /// Members of a structure or union with their offsets in bits; `None` for other types.
    fn members(&self, id: u32) -> Option<impl Iterator<Item = (Member, u32)>> {
        let header = self.type_of(id)?;
        if !matches!(header.kind(), kind::STRUCT | kind::UNION) {
            return None;
        }
        let start = self.start_of(id)? + size_of::<Type>();
        let bytes = self.types.get(start..start + size_of::<Member>() * header.length())?;
        let members =
            bytes.chunks_exact(size_of::<Member>()).filter_map(|chunk| Member::read_from_bytes(chunk).ok());
        let mask = if header.has_kind_flag() { 0xff_ffff } else { u32::MAX };
        Some(members.map(move |member| (member, member.offset & mask)))
    }

    /// A type without typedefs and qualifiers.
    fn plain(&self, mut id: u32) -> Option<u32> {
        for _ in 0..DEEPEST {
            let header = self.type_of(id)?;
            match header.kind() {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = header.target;
                }
                _ => return Some(id),
            }
        }
        None
    }

    fn type_of(&self, id: u32) -> Option<Type> {
        self.header_at(self.start_of(id)?)
    }

    fn start_of(&self, id: u32) -> Option<usize> {
        self.starts.get(id.checked_sub(1)? as usize).map(|start| *start as usize)
    }

    fn header_at(&self, start: usize) -> Option<Type> {
        Type::read_from_prefix(self.types.get(start..)?).ok().map(|(header, _)| header)
    }

    /// A string up to its NUL; empty where there is none.
    fn string(&self, offset: u32) -> &[u8] {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        rest.split(|byte| *byte == 0).next().unwrap_or_default()
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

    /// A BTF with types of these words and these strings.
    fn made_up(words: &[u32], strings: &[u8]) -> Vec<u8> {
        let (types, length) = (u32::try_from(words.len() * 4), u32::try_from(strings.len()));
        let (types, length) = (types.expect("short"), length.expect("short"));
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        for word in [24, 0, types, types, length].iter().chain(words) {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn two_structures_of_one_name_that_disagree_are_refused() {
        let structure = |offset| [1, kind::STRUCT << 24 | 1, 8, 3, 0, offset];
        let same = made_up(&[structure(32), structure(32)].concat(), b"\0s\0m\0");
        let types = KernelTypes::parse(&same).expect("well formed");
        assert_eq!(types.offset_of("s", "m").expect("they agree"), Some(4));
        let other = made_up(&[structure(32), structure(64)].concat(), b"\0s\0m\0");
        let types = KernelTypes::parse(&other).expect("well formed");
        assert!(matches!(types.offset_of("s", "m"), Err(BtfError::AmbiguousStructure(_))));
    }

    #[test]
    fn damaged_type_information_is_an_error_or_absent_never_a_panic() {
        assert!(KernelTypes::parse(b"").is_err());
        assert!(KernelTypes::parse(&[0; 64]).is_err());
        assert!(KernelTypes::parse(&made_up(&[1, 31 << 24, 0], b"\0s\0")).is_err(), "unknown kind");
        assert!(KernelTypes::parse(&made_up(&[1], b"\0s\0")).is_err(), "cut off");
        // A structure whose anonymous member is itself, and one with fewer members than it says.
        let cycle = made_up(&[1, kind::STRUCT << 24 | 1, 8, 0, 1, 0], b"\0s\0");
        let types = KernelTypes::parse(&cycle).expect("well formed");
        assert_eq!(types.offset_of("s", "m").expect("one structure"), None);
        let short = made_up(&[1, kind::STRUCT << 24 | 9, 8, 0, 1, 0], b"\0s\0");
        let types = KernelTypes::parse(&short).expect("the last type may be short");
        assert_eq!(types.offset_of("s", "m").expect("one structure"), None);
        let whole = fs::read(VMLINUX).expect("the machine that runs the tests shows its BTF");
        assert!(KernelTypes::parse(&whole[..whole.len() / 2]).is_err());
    }
}
