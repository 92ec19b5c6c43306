"""`/v1/files`: the objects."""

from typing import Any, Final, Literal

from pydantic import BaseModel

from app.storage.files import Page, StoredFile

# Of OpenAI's: inputs of batches, and images and texts of prompts.
PURPOSES: Final = ("batch", "user_data", "vision")
# The form of an upload, as OpenAPI describes it.
UPLOAD_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [*PURPOSES]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> "FileObject":
        return cls(
            id=file.id,
            bytes=file.num_bytes,
            created_at=file.created,
            expires_at=file.expires,
            filename=file.filename,
            purpose=file.purpose,
        )


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str
    last_id: str
    has_more: bool

    @classmethod
    def of(cls, page: Page[StoredFile]) -> "FileList":
        data = [FileObject.of(file) for file in page.items]
        return cls(
            data=data,
            first_id=data[0].id if data else "",
            last_id=data[-1].id if data else "",
            has_more=page.has_more,
        )


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
