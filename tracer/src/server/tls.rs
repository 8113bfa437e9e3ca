//! Encryption of a connection, as libpq means `sslmode` and its companions.
//!
//! Three things follow libpq and not rustls's own verifier: whether a certificate and whether a host's name is checked are
//! two questions; a certificate that is itself among the trusted ones is trusted, even if it says that it is an authority
//! (what `openssl req -x509` makes); and a name may stand in the subject of a certificate that has no other names.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature_with_raw_key};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::version::{TLS12, TLS13};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, OtherError, RootCertStore, SignatureScheme,
};
use tokio_postgres_rustls::MakeRustlsConnect;
use x509_cert::certificate::Version;
use x509_cert::der::asn1::{Ia5StringRef, PrintableStringRef, TeletexStringRef, Utf8StringRef};
use x509_cert::der::oid::db::rfc4519::CN;
use x509_cert::der::{Decode, Encode};
use x509_cert::ext::pkix::name::GeneralName;
use x509_cert::ext::pkix::{BasicConstraints, SubjectAltName};

use super::parameters::{ParameterError, Parameters};

/// Name of the protocol within TLS, as libpq gives it (`PG_ALPN_PROTOCOL` in `pqcomm.h`).
const ALPN: &[u8] = b"postgresql";

/// libpq's `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SslMode {
    /// No encryption.
    Disable,
    /// Only if the server insists.
    Allow,
    /// Unless the server does not offer it.
    Prefer,
    /// Always.
    Require,
    /// With a certificate that is trusted.
    VerifyCa,
    /// With a trusted certificate for this host.
    VerifyFull,
}

impl SslMode {
    const ALL: [(&str, Self); 6] = [
        ("disable", Self::Disable),
        ("allow", Self::Allow),
        ("prefer", Self::Prefer),
        ("require", Self::Require),
        ("verify-ca", Self::VerifyCa),
        ("verify-full", Self::VerifyFull),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, mode)| *mode == self).map_or("", |(name, _)| name)
    }
}

/// One attempt to connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encryption {
    /// Without.
    Plain,
    /// With, or without where the server does not offer it.
    Offered,
    /// With.
    Tls,
}

/// Why a connection cannot be encrypted as asked for.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// Not a mode that encrypts for sure.
    #[error("sslmode {mode} is too weak for {parameter}; set sslmode to {wanted}")]
    Weak {
        /// The mode that is set.
        mode: &'static str,
        /// What it is too weak for.
        parameter: &'static str,
        /// What would do.
        wanted: &'static str,
    },
    /// Nothing to verify with.
    #[error(
        "sslmode {mode} needs the certificate of an authority, and there is none in {}; name its file with sslrootcert, \
         or take the system's with sslrootcert=system",
        .path.as_deref().unwrap_or(Path::new("~/.postgresql/root.crt")).display()
    )]
    NoRoot {
        /// The mode that is set.
        mode: &'static str,
        /// Where it was looked for.
        path: Option<PathBuf>,
    },
    /// There is a list of revoked certificates, which libpq would heed.
    #[error(
        "{} lists certificates that are revoked, and pgiotrace cannot check them; connect through the Unix socket (-h), or \
         with sslmode=disable",
        .path.display()
    )]
    Revocations {
        /// The list.
        path: PathBuf,
    },
    /// The system trusts nobody.
    #[error(
        "the system's trusted certificates cannot be used: {detail}; install ca-certificates or set SSL_CERT_FILE"
    )]
    NoSystemRoots {
        /// What went wrong.
        detail: String,
    },
    /// A file that cannot be read.
    #[error("reading the file that {parameter} names, {}, failed: {source}; mend {parameter} or the file", .path.display())]
    Unreadable {
        /// What names the file.
        parameter: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A file that holds something else.
    #[error("the file that {parameter} names, {}, holds no {wanted} ({detail}); mend {parameter} or the file", .path.display())]
    Content {
        /// What names the file.
        parameter: &'static str,
        /// The file.
        path: PathBuf,
        /// What it should hold.
        wanted: &'static str,
        /// What went wrong.
        detail: String,
    },
    /// Others may read the private key.
    #[error("others may read the private key {0}; run chmod 0600 {0}", .path.display())]
    OpenKey {
        /// Its file.
        path: PathBuf,
    },
    /// The certificate and the key do not belong together, or are of an unknown kind.
    #[error("the certificate {} and the private key {} cannot be used: {detail}; mend sslcert and sslkey", .certificate.display(), .key.display())]
    Identity {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What went wrong.
        detail: String,
    },
}

/// Where trusted certificates come from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Roots {
    /// `sslrootcert=system`.
    System,
    /// A file, which need not exist; `None` without a home directory.
    File(Option<PathBuf>),
}

/// How to encrypt, before any file is read: a connection by a Unix socket needs none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tls {
    mode: SslMode,
    /// Whether TLS begins with the first byte.
    pub is_direct: bool,
    /// Whether TLS 1.2 is too old.
    needs_13: bool,
    roots: Roots,
    /// What libpq heeds where it exists (`initialize_SSL`, `fe-secure-openssl.c`), and rustls is not told of.
    revocations: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

/// Why [`Tls::of`] refuses.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// A value is unknown.
    #[error(transparent)]
    Value(#[from] ParameterError),
    /// The values do not go together.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl Tls {
    /// Reads the parameters; defaults are libpq's, below the home directory (`initialize_SSL` in
    /// `fe-secure-openssl.c`).
    pub fn of(parameters: &Parameters, home: Option<&Path>) -> Result<Self, Refusal> {
        let given = |name: &str| parameters.get(name).map(PathBuf::from);
        let default = |name: &str| home.map(|home| home.join(".postgresql").join(name));
        let roots = match parameters.get("sslrootcert") {
            Some("system") => Roots::System,
            _ => Roots::File(given("sslrootcert").or_else(|| default("root.crt"))),
        };
        let unset = if roots == Roots::System { SslMode::VerifyFull } else { SslMode::Prefer };
        let mode = choice(parameters, "sslmode", unset, &SslMode::ALL, MODES)?;
        let negotiations = [("postgres", false), ("direct", true)];
        let is_direct = choice(parameters, "sslnegotiation", false, &negotiations, "postgres or direct")?;
        let versions = [("TLSv1", false), ("TLSv1.1", false), ("TLSv1.2", false), ("TLSv1.3", true)];
        let needs_13 = choice(
            parameters,
            "ssl_min_protocol_version",
            false,
            &versions,
            "TLSv1, TLSv1.1, TLSv1.2 or TLSv1.3",
        )?;
        let weak = |parameter, wanted| TlsError::Weak { mode: mode.name(), parameter, wanted };
        if roots == Roots::System && mode != SslMode::VerifyFull {
            return Err(weak("sslrootcert=system", "verify-full").into());
        }
        if is_direct && mode < SslMode::Require {
            return Err(weak("sslnegotiation=direct", "require").into());
        }
        Ok(Self {
            mode,
            is_direct,
            needs_13,
            roots,
            revocations: default("root.crl"),
            certificate: given("sslcert").or_else(|| default("postgresql.crt")),
            key: given("sslkey").or_else(|| default("postgresql.key")),
        })
    }

    /// What to try over TCP first, and after that.
    pub fn attempts(&self) -> (Encryption, Option<Encryption>) {
        match self.mode {
            SslMode::Disable => (Encryption::Plain, None),
            SslMode::Allow => (Encryption::Plain, Some(Encryption::Tls)),
            SslMode::Prefer => (Encryption::Offered, Some(Encryption::Plain)),
            SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => (Encryption::Tls, None),
        }
    }

    /// Reads the files and prepares to encrypt.
    ///
    /// # Errors
    ///
    /// A [`TlsError`].
    pub fn connector(&self) -> Result<MakeRustlsConnect, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let verifier = Verifier {
            trusted: self.trusted()?,
            checks_name: self.mode == SslMode::VerifyFull,
            provider: Arc::clone(&provider),
        };
        let versions: &[_] = if self.needs_13 { &[&TLS13] } else { &[&TLS13, &TLS12] };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .expect("ring has cipher suites for both versions")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match self.identity()? {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                builder.with_client_auth_cert(identity.chain, identity.secret).map_err(|error| {
                    TlsError::Identity {
                        certificate: identity.certificate,
                        key: identity.key,
                        detail: error.to_string(),
                    }
                })?
            }
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(MakeRustlsConnect::new(config))
    }

    /// Whom to trust; `None` is everybody. A file that exists counts whatever the mode.
    fn trusted(&self) -> Result<Option<Trusted>, TlsError> {
        let path = match &self.roots {
            Roots::System => return Trusted::by_the_system().map(Some),
            Roots::File(path) => path.as_deref().filter(|path| exists(path)),
        };
        let revocations = self.revocations.as_deref().filter(|revocations| exists(revocations));
        if let (Some(_), Some(revocations)) = (path, revocations) {
            return Err(TlsError::Revocations { path: revocations.to_owned() });
        }
        match (path, &self.roots) {
            (Some(path), _) => Trusted::by_file(path).map(Some),
            (None, Roots::File(path)) if self.mode >= SslMode::VerifyCa => {
                Err(TlsError::NoRoot { mode: self.mode.name(), path: path.clone() })
            }
            (None, _) => Ok(None),
        }
    }

    /// The client's own certificate, if its file exists.
    fn identity(&self) -> Result<Option<Identity>, TlsError> {
        let Some(certificate) = self.certificate.clone().filter(|path| exists(path)) else { return Ok(None) };
        let chain = certificates("sslcert", &certificate)?;
        let key = self.key.clone().unwrap_or_default();
        let text = read("sslkey", &key)?;
        let found = fs::metadata(&key).map_err(|source| unreadable("sslkey", &key, source))?;
        // As libpq: root's may be its group's.
        let barred = if found.uid() == 0 { 0o037 } else { 0o077 };
        if found.mode() & barred != 0 {
            return Err(TlsError::OpenKey { path: key });
        }
        let secret = PrivateKeyDer::from_pem_slice(&text).map_err(|error| TlsError::Content {
            parameter: "sslkey",
            path: key.clone(),
            wanted: "private key in PEM format without a password",
            detail: error.to_string(),
        })?;
        Ok(Some(Identity { certificate, key, chain, secret }))
    }

    /// What a failure to encrypt means, and what to do, without the address; `None` where it is another failure.
    pub fn problem(&self, error: &postgres::Error) -> Option<String> {
        let cause = std::error::Error::source(error)?;
        if cause.to_string() == "server does not support TLS" {
            // The library has no other name for it (tokio-postgres, connect_tls.rs).
            return Some(
                "it does not support TLS; set ssl = on there, or sslmode to prefer or disable".to_owned(),
            );
        }
        let inner = cause.downcast_ref::<io::Error>()?.get_ref()?;
        match inner.downcast_ref::<rustls::Error>() {
            Some(rustls::Error::InvalidCertificate(error)) => Some(self.bad_certificate(error)),
            Some(rustls::Error::AlertReceived(_)) => Some(format!(
                "{inner}; the server's log says why, and sslcert may have to name another certificate"
            )),
            Some(error) => Some(format!("{error}; sslmode disable does without TLS")),
            None if inner.is::<rustls::pki_types::InvalidDnsNameError>() => Some(
                "the host is neither a name nor an address that a certificate can be for; mend -h".to_owned(),
            ),
            None => None,
        }
    }

    fn bad_certificate(&self, error: &CertificateError) -> String {
        let trusted = match &self.roots {
            Roots::System => "the system's trusted certificates".to_owned(),
            Roots::File(path) => path.clone().unwrap_or_default().display().to_string(),
        };
        match error {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
                "its certificate is not trusted: no certificate in {trusted} vouches for it; name the file of its \
                 authority's with sslrootcert"
            ),
            CertificateError::NotValidForNameContext { expected, presented } => format!(
                "its certificate is not for host \"{}\", but for {}; connect by such a name with -h, or set sslmode to \
                 verify-ca",
                expected.to_str(),
                if presented.is_empty() { "no host".to_owned() } else { presented.join(", ") }
            ),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "its certificate, or its authority's, has expired; renew that on the server".to_owned()
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "its certificate, or its authority's, is not valid yet; compare both machines' clocks"
                    .to_owned()
            }
            CertificateError::Other(OtherError(error)) => {
                format!("its certificate cannot be verified: {error}; give the server another one")
            }
            error => format!("its certificate cannot be verified: {error}; give the server another one"),
        }
    }
}

const MODES: &str = "disable, allow, prefer, require, verify-ca or verify-full";

/// One of several values of a parameter.
fn choice<T: Copy>(
    parameters: &Parameters,
    parameter: &'static str,
    default: T,
    values: &[(&str, T)],
    allowed: &'static str,
) -> Result<T, ParameterError> {
    let Some(value) = parameters.get(parameter) else { return Ok(default) };
    let found = values.iter().find(|(name, _)| *name == value).map(|(_, chosen)| *chosen);
    found.ok_or_else(|| ParameterError::Value { parameter, value: value.to_owned(), allowed })
}

/// Whether there is such a file; libpq takes only these two errors for "no".
fn exists(path: &Path) -> bool {
    let error = fs::metadata(path).err().map(|error| error.kind());
    !matches!(error, Some(io::ErrorKind::NotFound | io::ErrorKind::NotADirectory))
}

fn unreadable(parameter: &'static str, path: &Path, source: io::Error) -> TlsError {
    TlsError::Unreadable { parameter, path: path.to_owned(), source }
}

fn read(parameter: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| unreadable(parameter, path, source))
}

/// All certificates of a file, of which there must be one.
fn certificates(parameter: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(parameter, path)?;
    let content = |detail: String| TlsError::Content {
        parameter,
        path: path.to_owned(),
        wanted: "certificate in PEM format",
        detail,
    };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let all = all.map_err(|error| content(error.to_string()))?;
    if all.is_empty() { Err(content("it has no such section".to_owned())) } else { Ok(all) }
}

/// The client's own certificate.
struct Identity {
    certificate: PathBuf,
    key: PathBuf,
    chain: Vec<CertificateDer<'static>>,
    secret: PrivateKeyDer<'static>,
}

/// Whom to trust.
#[derive(Debug)]
struct Trusted {
    authorities: RootCertStore,
    /// The same, as they are.
    certificates: Vec<CertificateDer<'static>>,
}

impl Trusted {
    fn by_file(path: &Path) -> Result<Self, TlsError> {
        let certificates = certificates("sslrootcert", path)?;
        let mut authorities = RootCertStore::empty();
        // The others are trusted as they are, and nothing that they sign.
        for certificate in certificates.iter().filter(|certificate| is_authority(certificate)) {
            authorities.add(certificate.clone()).map_err(|error| TlsError::Content {
                parameter: "sslrootcert",
                path: path.to_owned(),
                wanted: "certificate of an authority",
                detail: error.to_string(),
            })?;
        }
        Ok(Self { authorities, certificates })
    }

    fn by_the_system() -> Result<Self, TlsError> {
        let found = rustls_native_certs::load_native_certs();
        let mut authorities = RootCertStore::empty();
        // One that is odd is no reason to trust none.
        let (added, _) = authorities.add_parsable_certificates(found.certs.iter().cloned());
        if added == 0 {
            let errors: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
            let detail = if errors.is_empty() { "there are none".to_owned() } else { errors.join(", ") };
            return Err(TlsError::NoSystemRoots { detail });
        }
        Ok(Self { authorities, certificates: found.certs })
    }
}

/// Whether a certificate may sign others today. The verifier asks nothing of whom it trusts.
fn is_authority(certificate: &CertificateDer<'_>) -> bool {
    let Ok(details) = parse(certificate) else { return false };
    let constraints = details.tbs_certificate.get::<BasicConstraints>();
    let is_ca = matches!(constraints, Ok(Some((_, BasicConstraints { ca: true, .. }))));
    is_ca && verify_validity(certificate, UnixTime::now()).is_ok()
}

/// What is checked of a server's certificate.
#[derive(Debug)]
struct Verifier {
    /// `None`: nothing but that the server has its key.
    trusted: Option<Trusted>,
    checks_name: bool,
    provider: Arc<CryptoProvider>,
}

/// A certificate that has no extensions, and so no names; the verifier knows only later versions.
#[derive(Debug, thiserror::Error)]
#[error("it is one of version 1 of X.509, and only version 3 can be verified")]
struct Version1;

impl Verifier {
    fn verify_trust(
        &self,
        trusted: &Trusted,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        if trusted.certificates.contains(certificate) {
            return verify_validity(certificate, now);
        }
        if parse(certificate)?.tbs_certificate.version == Version::V1 {
            return Err(CertificateError::Other(OtherError(Arc::new(Version1))).into());
        }
        let algorithms = self.provider.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(certificate)?;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &trusted.authorities,
            intermediates,
            now,
            algorithms,
        )
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if let Some(trusted) = &self.trusted {
            self.verify_trust(trusted, certificate, intermediates, now)?;
        }
        if self.checks_name {
            verify_name(certificate, name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    /// By the key alone, so that the certificate may be of any version. Never left out: channel binding relies on it.
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = parse(certificate)?.tbs_certificate.subject_public_key_info.to_der();
        let key = SubjectPublicKeyInfoDer::from(key.map_err(|_| CertificateError::BadEncoding)?);
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn parse(certificate: &CertificateDer<'_>) -> Result<x509_cert::Certificate, rustls::Error> {
    x509_cert::Certificate::from_der(certificate).map_err(|_| CertificateError::BadEncoding.into())
}

/// Whether it is valid now, for one that nobody else vouches for.
fn verify_validity(certificate: &CertificateDer<'_>, now: UnixTime) -> Result<(), rustls::Error> {
    let validity = parse(certificate)?.tbs_certificate.validity;
    if now.as_secs() < validity.not_before.to_unix_duration().as_secs() {
        return Err(CertificateError::NotValidYet.into());
    }
    if now.as_secs() > validity.not_after.to_unix_duration().as_secs() {
        return Err(CertificateError::Expired.into());
    }
    Ok(())
}

/// Whether it is for this host: by its names of that kind, or for want of these by its common name
/// (`pgtls_verify_peer_name_matches_certificate_guts` in `fe-secure-openssl.c`).
fn verify_name(certificate: &CertificateDer<'_>, name: &ServerName<'_>) -> Result<(), rustls::Error> {
    let details = parse(certificate)?;
    let names = details.tbs_certificate.get::<SubjectAltName>().map_err(|_| CertificateError::BadEncoding)?;
    let names = names.map(|(_, SubjectAltName(names))| names).unwrap_or_default();
    let is_for_names = matches!(name, ServerName::DnsName(_));
    let is_of_kind = |entry: &GeneralName| match entry {
        GeneralName::DnsName(_) => is_for_names,
        GeneralName::IpAddress(_) => !is_for_names,
        _ => false,
    };
    let common: Vec<_> = common_names(&details).collect();
    let fits = if names.iter().any(is_of_kind) {
        verify_server_name(&ParsedCertificate::try_from(certificate)?, name).is_ok()
    } else {
        common.first().is_some_and(|common| names_match(common, &name.to_str()))
    };
    let readable: Vec<_> = names.iter().filter_map(readable_name).collect();
    let presented = if readable.is_empty() { common } else { readable };
    let other = || CertificateError::NotValidForNameContext { expected: name.to_owned(), presented };
    if fits { Ok(()) } else { Err(other().into()) }
}

fn readable_name(name: &GeneralName) -> Option<String> {
    match name {
        GeneralName::DnsName(name) => Some(name.as_str().to_owned()),
        GeneralName::IpAddress(address) => {
            let bytes = address.as_bytes();
            let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
            v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok().map(|ip| ip.to_string())
        }
        _ => None,
    }
}

fn common_names(details: &x509_cert::Certificate) -> impl Iterator<Item = String> {
    let parts = details.tbs_certificate.subject.0.iter().flat_map(|part| part.0.iter());
    parts.filter(|part| part.oid == CN).filter_map(|part| {
        let value = &part.value;
        let utf8 = value.decode_as::<Utf8StringRef>().map(|text| text.as_str().to_owned());
        let printable = || value.decode_as::<PrintableStringRef>().map(|text| text.as_str().to_owned());
        let ia5 = || value.decode_as::<Ia5StringRef>().map(|text| text.as_str().to_owned());
        let teletex = || value.decode_as::<TeletexStringRef>().map(|text| text.as_str().to_owned());
        utf8.or_else(|_| printable()).or_else(|_| ia5()).or_else(|_| teletex()).ok()
    })
}

/// The same name but for case; `*.` stands for one label.
fn names_match(pattern: &str, host: &str) -> bool {
    let wildcard = pattern.strip_prefix("*.").and_then(|domain| Some((domain, host.split_once('.')?)));
    pattern.eq_ignore_ascii_case(host)
        || wildcard
            .is_some_and(|(domain, (label, rest))| !label.is_empty() && domain.eq_ignore_ascii_case(rest))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

    use super::*;

    /// Made by `openssl x509 -req -signkey`, as PostgreSQL's manual shows it; its common name is `*.old.example`.
    const VERSION_1: &[u8] = include_bytes!("testdata/version_1.der");
    /// Within its time, and well after it.
    const IN_2030: u64 = 1_893_456_000;
    const IN_2200: u64 = 7_258_118_400;

    fn of(string: &str) -> Result<Tls, Refusal> {
        let parameters = Parameters::of_connection_string(string).expect("it is valid");
        Tls::of(&parameters.unwrap_or_default(), Some(Path::new("/home/alice")))
    }

    #[test]
    fn each_mode_has_its_attempts() {
        use Encryption::{Offered, Plain, Tls};
        for (string, attempts) in [
            ("", (Offered, Some(Plain))),
            ("sslmode=disable", (Plain, None)),
            ("sslmode=allow", (Plain, Some(Tls))),
            ("sslmode=prefer", (Offered, Some(Plain))),
            ("sslmode=require", (Tls, None)),
            ("sslmode=verify-ca", (Tls, None)),
            ("sslmode=verify-full", (Tls, None)),
            ("sslrootcert=system", (Tls, None)),
        ] {
            assert_eq!(of(string).expect("it is valid").attempts(), attempts, "{string}");
        }
        assert_eq!(of("sslrootcert=system").map(|tls| tls.mode).ok(), Some(SslMode::VerifyFull));
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        for (string, part) in [
            ("sslmode=on", "sslmode cannot be \"on\"; it is disable, allow,"),
            (
                "sslrootcert=system sslmode=require",
                "too weak for sslrootcert=system; set sslmode to verify-full",
            ),
            ("sslnegotiation=direct", "prefer is too weak for sslnegotiation=direct"),
            ("ssl_min_protocol_version=4", "ssl_min_protocol_version cannot be"),
        ] {
            let refusal = of(string).expect_err("it makes no sense").to_string();
            assert!(refusal.contains(part), "{refusal}");
        }
    }

    #[test]
    fn only_verifying_wants_an_authority() {
        assert!(of("sslmode=require").expect("it is valid").trusted().expect("nothing is wanted").is_none());
        let error = of("sslmode=verify-ca").expect("it is valid").trusted().expect_err("there is no file");
        assert!(error.to_string().contains("none in /home/alice/.postgresql/root.crt"), "{error}");
    }

    /// An authority, and a certificate by it for these names and this common name.
    fn certified(names: &[&str], common: &str) -> (CertificateDer<'static>, CertificateDer<'static>) {
        let key = KeyPair::generate().expect("a key");
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.distinguished_name.push(DnType::CommonName, "an authority");
        let authority_der = authority.self_signed(&key).expect("a certificate").der().clone();
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let mut server = CertificateParams::new(names).expect("names");
        server.distinguished_name.push(DnType::CommonName, common);
        let issuer = Issuer::new(authority, key);
        let server_key = KeyPair::generate().expect("a key");
        let server = server.signed_by(&server_key, &issuer).expect("a certificate").der().clone();
        (authority_der, server)
    }

    fn verifier(trusted: Option<&CertificateDer<'static>>, checks_name: bool) -> Verifier {
        let trusted = trusted.map(|certificate| {
            let mut authorities = RootCertStore::empty();
            authorities.add(certificate.clone()).expect("it is a certificate");
            Trusted { authorities, certificates: vec![certificate.clone()] }
        });
        Verifier { trusted, checks_name, provider: Arc::new(ring::default_provider()) }
    }

    fn verify(
        verifier: &Verifier,
        certificate: &CertificateDer<'_>,
        host: &str,
        at: u64,
    ) -> Result<(), String> {
        let name = ServerName::try_from(host.to_owned()).expect("it is a name");
        let now = UnixTime::since_unix_epoch(Duration::from_secs(at));
        let tls = of("sslrootcert=/root.crt").expect("it is valid");
        let outcome = verifier.verify_server_cert(certificate, &[], &name, &[], now);
        outcome.map(|_| ()).map_err(|error| match error {
            rustls::Error::InvalidCertificate(error) => tls.bad_certificate(&error),
            other => other.to_string(),
        })
    }

    #[test]
    fn trust_and_name_are_two_questions() {
        let (authority, server) = certified(&["db.example", "127.0.0.1"], "other.example");
        let (stranger, _) = certified(&[], "x");
        for (trusted, checks_name, host, part) in [
            (None, false, "anything", None),
            (Some(&authority), false, "anything", None),
            (Some(&stranger), false, "db.example", Some("not trusted: no certificate in /root.crt")),
            (Some(&authority), true, "db.example", None),
            (Some(&authority), true, "127.0.0.1", None),
            (
                Some(&authority),
                true,
                "127.0.0.2",
                Some("not for host \"127.0.0.2\", but for db.example, 127.0.0.1;"),
            ),
            (Some(&authority), true, "other.example", Some("not for host \"other.example\"")),
        ] {
            let outcome = verify(&verifier(trusted, checks_name), &server, host, IN_2030);
            match (outcome, part) {
                (Ok(()), None) => {}
                (Err(said), Some(part)) if said.contains(part) => {}
                (outcome, _) => panic!("{host}: {outcome:?}, expected {part:?}"),
            }
        }
    }

    #[test]
    fn a_common_name_counts_where_there_are_no_names() {
        let (authority, server) = certified(&[], "*.example");
        let verifier = verifier(Some(&authority), true);
        assert_eq!(verify(&verifier, &server, "DB.Example", IN_2030), Ok(()));
        for host in ["example", "a.db.example"] {
            let said = verify(&verifier, &server, host, IN_2030).expect_err("it is another name");
            assert!(said.contains("but for *.example"), "{said}");
        }
    }

    #[test]
    fn a_certificate_that_is_trusted_itself_needs_no_authority() {
        let old = CertificateDer::from(VERSION_1);
        let itself = verifier(Some(&old), true);
        assert_eq!(verify(&itself, &old, "db.old.example", IN_2030), Ok(()));
        assert!(verify(&itself, &old, "db.new.example", IN_2030).is_err());
        assert!(verify(&itself, &old, "db.old.example", IN_2200).expect_err("it is old").contains("expired"));
        assert!(verify(&itself, &old, "db.old.example", 0).expect_err("it is new").contains("not valid yet"));
        let (authority, _) = certified(&[], "x");
        let said =
            verify(&verifier(Some(&authority), false), &old, "x", IN_2030).expect_err("nobody vouches");
        assert!(said.contains("version 1"), "{said}");
        // What `openssl req -x509` makes calls itself an authority.
        assert_eq!(verify(&verifier(Some(&authority), false), &authority, "x", IN_2030), Ok(()));
    }

    #[test]
    fn the_clients_certificate_is_optional_and_its_key_kept_from_others() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let home = folder.path();
        let tls = Tls::of(&Parameters::default(), Some(home)).expect("nothing is set");
        assert!(tls.identity().expect("there is none").is_none());
        let place = home.join(".postgresql");
        fs::create_dir(&place).expect("a directory");
        let key = KeyPair::generate().expect("a key");
        let certificate = CertificateParams::default().self_signed(&key).expect("a certificate");
        fs::write(place.join("postgresql.crt"), certificate.pem()).expect("a file");
        let said = |tls: &Tls| tls.identity().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(said(&tls).contains("reading the file that sslkey names"), "{}", said(&tls));
        let key_file = place.join("postgresql.key");
        fs::write(&key_file, key.serialize_pem()).expect("a file");
        let permit =
            |mode| fs::set_permissions(&key_file, fs::Permissions::from_mode(mode)).expect("its owner may");
        permit(0o644);
        assert!(said(&tls).contains("run chmod 0600"), "{}", said(&tls));
        permit(0o600);
        assert!(tls.identity().expect("all is well").is_some());
        tls.connector().expect("key and certificate belong together");
        fs::write(
            &key_file,
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
        )
        .expect("a file");
        assert!(said(&tls).contains("without a password"), "{}", said(&tls));
    }

    #[test]
    fn files_that_hold_something_else_are_named() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let path = folder.path().join("root.crt");
        fs::write(&path, "nonsense").expect("a file");
        let error = of(&format!("sslrootcert={}", path.display())).expect("it is valid").connector();
        let said = error.err().expect("it holds no certificate").to_string();
        assert!(said.contains("root.crt, holds no certificate in PEM format"), "{said}");
        let error = of(&format!("sslrootcert={}", folder.path().display())).expect("it is valid").connector();
        assert!(
            error
                .err()
                .is_some_and(|error| error.to_string().contains("reading the file that sslrootcert names"))
        );
    }
}
